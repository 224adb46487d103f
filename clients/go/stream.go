package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/flight"
	"github.com/apache/arrow-go/v18/arrow/ipc"
)

// The rows of the right side arrive in the call. Its name is a label for columns and errors, and names no table.
const streamJoin = `{"join": {
	"left": "` + orders + `", "right": "lines", "on": [{"left": "o_orderkey", "right": "l_orderkey"}],
	"how": "inner", "columns": ["o_orderkey", "o_orderpriority", "l_quantity"], "stream": "right"}}`

const (
	questionRows = 20
	batchRows    = 1_000
)

// runStream joins the uploaded orders with lines that it sends in one call. It asks for the first lines and waits for
// the answer. Then it sends all lines, and reads what they join with in the meantime.
func runStream(ctx context.Context, client flight.Client, lines arrow.RecordBatch) error {
	// A cancelled call cancels the join.
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	stream, err := client.DoExchange(ctx)
	if err != nil {
		return err
	}
	writer := flight.NewRecordWriter(stream, ipc.WithSchema(lines.Schema()))
	writer.SetFlightDescriptor(&flight.FlightDescriptor{Type: flight.DescriptorCMD, Cmd: []byte(streamJoin)})
	// The writer sends the schema with the first batch, and the server answers with that of the joined rows. To a
	// sender, gRPC says io.EOF for any failure of the call; what the server said comes when receiving.
	if err := write(writer, lines, 0, 0); err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	reader, err := flight.NewRecordReader(stream)
	if err != nil {
		return err
	}
	defer reader.Release()

	question := lines.NewSlice(0, questionRows)
	defer question.Release()
	answer, err := ask(writer, reader, question, []byte("question 1"))
	if err != nil {
		return err
	}
	if err := answer.check(question); err != nil {
		return err
	}
	fmt.Printf("answer rows=%d checksum=%d\n", answer.rows, answer.checksum)

	// The server stops reading while the joined rows are not read. A goroutine sends, so that neither side waits.
	sent := make(chan struct{})
	go func() {
		defer close(sent)
		if err := sendAll(writer, stream, lines); err != nil && !errors.Is(err, io.EOF) {
			cancel(err)
		}
	}()
	// The goroutine uses lines, which the caller releases.
	defer func() { cancel(nil); <-sent }()
	var got totals
	for reader.Next() {
		if err := got.addAll(reader.RecordBatch()); err != nil {
			return err
		}
	}
	if err := context.Cause(ctx); err != nil {
		return err
	}
	if err := reader.Err(); err != nil {
		return err
	}
	if err := got.check(lines); err != nil {
		return err
	}
	fmt.Printf("rows=%d checksum=%d\n", got.rows, got.checksum)
	return nil
}

// ask sends rows, and reads the rows that they join with. The app_metadata goes with a batch without rows after them.
// When all rows before it are joined, the server sends it back, with a batch without rows.
func ask(writer *flight.Writer, reader *flight.Reader, rows arrow.RecordBatch, question []byte) (totals, error) {
	var answer totals
	end := rows.NewSlice(0, 0)
	defer end.Release()
	err := writer.Write(rows)
	if err == nil {
		err = writer.WriteWithAppMetadata(end, question)
	}
	if err != nil && !errors.Is(err, io.EOF) {
		return answer, err
	}
	// The server also sends batches without rows and without app_metadata, while there is nothing else.
	for reader.Next() {
		if err := answer.addAll(reader.RecordBatch()); err != nil {
			return answer, err
		}
		if bytes.Equal(reader.LatestAppMetadata(), question) {
			return answer, nil
		}
	}
	if err := reader.Err(); err != nil {
		return answer, err
	}
	return answer, errors.New("the server ended the call before the end of its answer")
}

// sendAll sends lines in batches, and ends the rows. Only then does the server end the joined rows.
func sendAll(writer *flight.Writer, stream flight.FlightService_DoExchangeClient, lines arrow.RecordBatch) error {
	for first := int64(0); first < lines.NumRows(); first += batchRows {
		if err := write(writer, lines, first, min(first+batchRows, lines.NumRows())); err != nil {
			return err
		}
	}
	return errors.Join(writer.Close(), stream.CloseSend())
}

// write sends the rows from first to end as one batch.
func write(writer *flight.Writer, rows arrow.RecordBatch, first, end int64) error {
	batch := rows.NewSlice(first, end)
	defer batch.Release()
	return writer.Write(batch)
}
