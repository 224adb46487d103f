package dovetail.example;

import dovetail.example.Join.Totals;
import java.nio.charset.StandardCharsets;
import java.util.concurrent.locks.LockSupport;
import org.apache.arrow.flight.FlightClient;
import org.apache.arrow.flight.FlightClient.ClientStreamListener;
import org.apache.arrow.flight.FlightClient.ExchangeReaderWriter;
import org.apache.arrow.flight.FlightDescriptor;
import org.apache.arrow.flight.FlightStream;
import org.apache.arrow.memory.ArrowBuf;
import org.apache.arrow.memory.BufferAllocator;
import org.apache.arrow.vector.VectorSchemaRoot;

/** Joins the uploaded orders with lines that are sent in one call. */
final class StreamJoin {
    private static final int QUESTION_ROWS = 20;
    private static final int BATCH_ROWS = 1_000;

    /** The rows of the right side arrive in the call. Its name is a label for columns and errors, not a table. */
    private static final String JOIN = """
            {"join": {
              "left": "%s", "right": "lines", "on": [{"left": "o_orderkey", "right": "l_orderkey"}],
              "how": "inner", "columns": ["o_orderkey", "o_orderpriority", "l_quantity"], "stream": "right"}}
            """.formatted(Join.ORDERS);

    private final BufferAllocator allocator;
    private final VectorSchemaRoot lines;

    /** The rows of the next message to the server. */
    private final VectorSchemaRoot batch;

    private final ClientStreamListener writer;
    private final FlightStream reader;

    /** True when there are no further joined rows, also after an error. */
    private volatile boolean hasEnded;

    private StreamJoin(
            BufferAllocator allocator, VectorSchemaRoot lines, VectorSchemaRoot batch, ExchangeReaderWriter exchange) {
        this.allocator = allocator;
        this.lines = lines;
        this.batch = batch;
        this.writer = exchange.getWriter();
        this.reader = exchange.getReader();
    }

    /**
     * Asks for the first lines and waits for the answer. Then sends all lines, and reads what they join with in the
     * meantime.
     */
    static void run(FlightClient client, BufferAllocator allocator, VectorSchemaRoot lines) throws Exception {
        FlightDescriptor command = FlightDescriptor.command(JOIN.getBytes(StandardCharsets.UTF_8));
        // Closing the exchange before its end cancels the call, and with it the join.
        try (VectorSchemaRoot batch = VectorSchemaRoot.create(lines.getSchema(), allocator);
                ExchangeReaderWriter exchange = client.doExchange(command)) {
            StreamJoin join = new StreamJoin(allocator, lines, batch, exchange);
            join.writer.start(batch);
            Totals answer = join.ask(QUESTION_ROWS, "question 1");
            answer.check(lines, QUESTION_ROWS);
            System.out.println("answer " + answer);
            Totals all = join.joinAll();
            all.check(lines, lines.getRowCount());
            System.out.println(all);
        }
    }

    /**
     * Sends the first lines with app_metadata, and reads the rows that they join with. After the last of them the
     * server sends a batch without rows that has the same app_metadata. It also sends batches without rows while there
     * is nothing else.
     */
    private Totals ask(int count, String question) {
        byte[] bytes = question.getBytes(StandardCharsets.UTF_8);
        ArrowBuf metadata = allocator.buffer(bytes.length);
        metadata.writeBytes(bytes);
        fill(0, count);
        // The writer releases the metadata.
        writer.putNext(metadata);
        Totals answer = new Totals();
        while (reader.next()) {
            answer.addAll(reader.getRoot());
            if (question.equals(latestMetadata())) {
                return answer;
            }
        }
        throw new IllegalStateException("the server ended the call before the end of its answer");
    }

    /**
     * Sends all lines, and reads the joined rows in the meantime. The library takes them from the server as fast as
     * they come, so rows that are not read fill the memory of this process.
     */
    private Totals joinAll() throws InterruptedException {
        Thread sender = new Thread(this::sendAll, "sender");
        sender.start();
        try {
            Totals totals = new Totals();
            while (reader.next()) {
                totals.addAll(reader.getRoot());
            }
            return totals;
        } catch (RuntimeException error) {
            // Otherwise the sender waits for the server.
            reader.cancel("reading failed", error);
            throw error;
        } finally {
            hasEnded = true;
            sender.join();
        }
    }

    private void sendAll() {
        try {
            for (int first = 0; first < lines.getRowCount(); first += BATCH_ROWS) {
                fill(first, Math.min(BATCH_ROWS, lines.getRowCount() - first));
                // putNext waits too, but in a loop that keeps a core busy.
                while (!writer.isReady() && !hasEnded) {
                    LockSupport.parkNanos(1_000_000);
                }
                writer.putNext();
            }
            // Only now does the server end the joined rows.
            writer.completed();
        } catch (RuntimeException error) {
            // The reader throws this error, or the one for which the call failed before.
            reader.cancel("sending failed", error);
        }
    }

    /** Makes lines the rows of the next message. */
    private void fill(int first, int count) {
        for (int column = 0; column < lines.getFieldVectors().size(); column++) {
            lines.getVector(column).makeTransferPair(batch.getVector(column)).splitAndTransfer(first, count);
        }
        batch.setRowCount(count);
    }

    private String latestMetadata() {
        ArrowBuf metadata = reader.getLatestMetadata();
        return metadata == null ? null : StandardCharsets.UTF_8.decode(metadata.nioBuffer()).toString();
    }
}
