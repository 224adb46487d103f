// Command join uploads two tables to a Dovetail server, joins them there, and checks every row that comes back.
// With stream, it uploads one table, and sends the rows of the other while the join runs (stream.go).
//
//	go run . grpc://127.0.0.1:8815
//	go run . stream grpc://127.0.0.1:8815
package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"math"
	"net/url"
	"os"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/flight"
	"github.com/apache/arrow-go/v18/arrow/ipc"
	"github.com/apache/arrow-go/v18/arrow/memory"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

const (
	orders, orderCount = "example_orders", 10_000
	lines, lineCount   = "example_lineitem", 100_000
)

// A command is a JSON object with one key; proto/dovetail.proto lists its fields.
const join = `{"join": {
	"left": "` + orders + `", "right": "` + lines + `", "on": [{"left": "o_orderkey", "right": "l_orderkey"}],
	"how": "inner", "columns": ["o_orderkey", "o_orderpriority", "l_quantity"]}}`

// totals is what the rows of a join add up to, whatever order they come in.
type totals struct{ rows, checksum int64 }

func (t *totals) add(orderkey, quantity int64) {
	t.rows++
	t.checksum += orderkey * quantity
}

// addAll checks the rows of a joined batch and adds them.
func (t *totals) addAll(batch arrow.RecordBatch) error {
	keys, keysOk := batch.Column(0).(*array.Int64)
	priorities, prioritiesOk := batch.Column(1).(*array.String)
	quantities, quantitiesOk := batch.Column(2).(*array.Int64)
	if !keysOk || !prioritiesOk || !quantitiesOk {
		return fmt.Errorf("the result has the columns %v; int64, utf8 and int64 were expected", batch.Schema())
	}
	for row := range int(batch.NumRows()) {
		if got, expected := priorities.Value(row), priority(keys.Value(row)); got != expected {
			return fmt.Errorf("order %d came back with priority %q; %q was uploaded", keys.Value(row), got, expected)
		}
		t.add(keys.Value(row), quantities.Value(row))
	}
	return nil
}

// check compares with the join of lines: each line that has an order, once.
func (t *totals) check(lines arrow.RecordBatch) error {
	keys, quantities := lines.Column(0).(*array.Int64), lines.Column(1).(*array.Int64)
	var expected totals
	for row := range int(lines.NumRows()) {
		if key := keys.Value(row); key < orderCount {
			expected.add(key, quantities.Value(row))
		}
	}
	if *t != expected {
		return fmt.Errorf("the join has %d rows with checksum %d; %d with checksum %d were expected",
			t.rows, t.checksum, expected.rows, expected.checksum)
	}
	return nil
}

func main() {
	streams := len(os.Args) == 3 && os.Args[1] == "stream"
	if len(os.Args) != 2 && !streams {
		fmt.Fprintln(os.Stderr, "usage: join [stream] URI, such as: join grpc://127.0.0.1:8815")
		os.Exit(2)
	}
	if err := run(context.Background(), os.Args[len(os.Args)-1], streams); err != nil {
		fmt.Fprintln(os.Stderr, "join:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, uri string, streams bool) error {
	client, err := connect(uri)
	if err != nil {
		return fmt.Errorf("connecting to %s: %w", uri, err)
	}
	defer client.Close()

	ordersBatch, linesBatch := tables()
	defer ordersBatch.Release()
	defer linesBatch.Release()
	if err := upload(ctx, client, orders, ordersBatch); err != nil {
		return fmt.Errorf("uploading %s to %s: %w", orders, uri, said(err))
	}
	if streams {
		if err := runStream(ctx, client, linesBatch); err != nil {
			return fmt.Errorf("streaming lines to %s: %w", uri, said(err))
		}
		return nil
	}

	if err := upload(ctx, client, lines, linesBatch); err != nil {
		return fmt.Errorf("uploading %s to %s: %w", lines, uri, said(err))
	}
	info, err := runJoin(ctx, client)
	if err != nil {
		return fmt.Errorf("running the join at %s: %w", uri, said(err))
	}
	var got totals
	// The endpoints are parts of one result. They are read here one by one; goroutines may read them at once.
	for _, endpoint := range info.Endpoint {
		if err := fetch(ctx, client, endpoint.Ticket, &got); err != nil {
			return fmt.Errorf("reading the join from %s: %w", uri, said(err))
		}
	}
	if err := got.check(linesBatch); err != nil {
		return err
	}
	fmt.Printf("rows=%d checksum=%d\n", got.rows, got.checksum)
	return nil
}

// connect makes a client of a URI such as grpc://HOST:PORT, or grpc+tls://HOST:PORT. Nothing is sent yet.
func connect(uri string) (flight.Client, error) {
	parsed, err := url.Parse(uri)
	if err != nil {
		return nil, err
	}
	var transport credentials.TransportCredentials
	switch parsed.Scheme {
	case "grpc", "grpc+tcp":
		transport = insecure.NewCredentials()
	case "grpc+tls":
		transport = credentials.NewTLS(&tls.Config{MinVersion: tls.VersionTLS12})
	default:
		return nil, errors.New("the scheme is not grpc, grpc+tcp or grpc+tls; write a URI such as grpc://127.0.0.1:8815")
	}
	return flight.NewClientWithMiddleware(parsed.Host, nil, nil,
		grpc.WithTransportCredentials(transport),
		// gRPC's own limit is 4 MiB, which a batch with a single large value may exceed.
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(math.MaxInt32)))
}

// upload sends one table, in place of an earlier one of its name. The table appears when the stream ends well.
func upload(ctx context.Context, client flight.Client, table string, batch arrow.RecordBatch) error {
	// Leaving early must not look like the end of the table: it cancels the call, and the server forgets what came.
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	ctx = metadata.AppendToOutgoingContext(ctx, "dovetail-upload-options", `{"mode": "replace"}`)
	stream, err := client.DoPut(ctx)
	if err != nil {
		return err
	}
	writer := flight.NewRecordWriter(stream, ipc.WithSchema(batch.Schema()))
	writer.SetFlightDescriptor(&flight.FlightDescriptor{Type: flight.DescriptorPATH, Path: []string{table}})
	err = writer.Write(batch)
	if err == nil {
		err = errors.Join(writer.Close(), stream.CloseSend())
	}
	// To a sender, gRPC says io.EOF for any failure of the call; what the server said comes when receiving.
	if err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	for {
		if _, err := stream.Recv(); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
	}
}

// runJoin starts the join and waits for its end. The server answers a poll as soon as the join ends, or after a moment.
// A program that reads rows while they are made asks GetFlightInfo instead, and its DoGet waits for the rows.
func runJoin(ctx context.Context, client flight.Client) (*flight.FlightInfo, error) {
	descriptor := &flight.FlightDescriptor{Type: flight.DescriptorCMD, Cmd: []byte(join)}
	for {
		poll, err := client.PollFlightInfo(ctx, descriptor)
		if err != nil {
			return nil, err
		}
		// The descriptor of the next poll, until the join is complete.
		if descriptor = poll.GetFlightDescriptor(); descriptor == nil {
			return poll.GetInfo(), nil
		}
	}
}

// fetch reads one endpoint, checks its rows and adds them up.
func fetch(ctx context.Context, client flight.Client, ticket *flight.Ticket, sum *totals) error {
	stream, err := client.DoGet(ctx, ticket)
	if err != nil {
		return err
	}
	reader, err := flight.NewRecordReader(stream)
	if err != nil {
		return err
	}
	defer reader.Release()
	for reader.Next() {
		if err := sum.addAll(reader.RecordBatch()); err != nil {
			return err
		}
	}
	return reader.Err()
}

// tables makes both tables. Some orders have no line, some lines no order.
func tables() (ordersBatch, linesBatch arrow.RecordBatch) {
	ordersBuilder := array.NewRecordBuilder(memory.DefaultAllocator, arrow.NewSchema([]arrow.Field{
		{Name: "o_orderkey", Type: arrow.PrimitiveTypes.Int64},
		{Name: "o_orderpriority", Type: arrow.BinaryTypes.String},
	}, nil))
	defer ordersBuilder.Release()
	for key := range int64(orderCount) {
		ordersBuilder.Field(0).(*array.Int64Builder).Append(key)
		ordersBuilder.Field(1).(*array.StringBuilder).Append(priority(key))
	}

	linesBuilder := array.NewRecordBuilder(memory.DefaultAllocator, arrow.NewSchema([]arrow.Field{
		{Name: "l_orderkey", Type: arrow.PrimitiveTypes.Int64},
		{Name: "l_quantity", Type: arrow.PrimitiveTypes.Int64},
	}, nil))
	defer linesBuilder.Release()
	for line := range int64(lineCount) {
		linesBuilder.Field(0).(*array.Int64Builder).Append(line * 8_111 % 12_000)
		linesBuilder.Field(1).(*array.Int64Builder).Append(line%50 + 1)
	}
	return ordersBuilder.NewRecordBatch(), linesBuilder.NewRecordBatch()
}

func priority(orderkey int64) string { return fmt.Sprintf("priority %d", orderkey%5+1) }

// said turns an error of gRPC into the server's own sentence, with the kind of error behind it.
func said(err error) error {
	if answer, ok := status.FromError(err); ok {
		return fmt.Errorf("%s (%s)", answer.Message(), answer.Code())
	}
	return err
}
