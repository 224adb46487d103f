package dovetail.example;

import io.grpc.StatusRuntimeException;
import java.nio.charset.StandardCharsets;
import org.apache.arrow.flight.AsyncPutListener;
import org.apache.arrow.flight.FlightCallHeaders;
import org.apache.arrow.flight.FlightClient;
import org.apache.arrow.flight.FlightClient.ClientStreamListener;
import org.apache.arrow.flight.FlightDescriptor;
import org.apache.arrow.flight.FlightEndpoint;
import org.apache.arrow.flight.FlightInfo;
import org.apache.arrow.flight.FlightRuntimeException;
import org.apache.arrow.flight.FlightStream;
import org.apache.arrow.flight.HeaderCallOption;
import org.apache.arrow.flight.Location;
import org.apache.arrow.flight.PollInfo;
import org.apache.arrow.flight.Ticket;
import org.apache.arrow.memory.BufferAllocator;
import org.apache.arrow.memory.RootAllocator;
import org.apache.arrow.vector.BigIntVector;
import org.apache.arrow.vector.VarCharVector;
import org.apache.arrow.vector.VectorSchemaRoot;

/**
 * Uploads two tables to a Dovetail server, joins them there, and checks every row that comes back. With stream, it
 * uploads one table, and sends the rows of the other while the join runs ({@link StreamJoin}).
 */
public final class Join {
    static final String ORDERS = "example_orders";
    private static final String LINES = "example_lineitem";
    private static final int ORDER_COUNT = 10_000;
    private static final int LINE_COUNT = 100_000;

    /** A command is a JSON object with one key; proto/dovetail.proto lists its fields. */
    private static final String JOIN = """
            {"join": {
              "left": "%s", "right": "%s", "on": [{"left": "o_orderkey", "right": "l_orderkey"}],
              "how": "inner", "columns": ["o_orderkey", "o_orderpriority", "l_quantity"]}}
            """.formatted(ORDERS, LINES);

    private final String uri;

    /** What is being done, for the message when it fails. */
    private String attempt;

    private Join(String uri) {
        this.uri = uri;
        this.attempt = "connecting to " + uri;
    }

    /**
     * Prints what the join adds up to, or what went wrong.
     *
     * @param arguments the server's URI, such as grpc://127.0.0.1:8815 or grpc+tls://HOST:PORT; before it, stream
     */
    public static void main(String[] arguments) {
        boolean streams = arguments.length == 2 && arguments[0].equals("stream");
        if (arguments.length != 1 && !streams) {
            System.err.println("usage: join [stream] URI, such as: join grpc://127.0.0.1:8815");
            System.exit(2);
        }
        Join join = new Join(arguments[arguments.length - 1]);
        try {
            join.run(streams);
        } catch (Exception error) {
            System.err.printf("join: %s: %s%n", join.attempt, describe(error));
            System.exit(1);
        }
    }

    private void run(boolean streams) throws Exception {
        try (BufferAllocator allocator = new RootAllocator();
                FlightClient client = FlightClient.builder(allocator, new Location(uri)).build();
                VectorSchemaRoot orders = orders(allocator);
                VectorSchemaRoot lines = lines(allocator)) {
            upload(client, ORDERS, orders);
            if (streams) {
                attempt = "streaming lines to " + uri;
                StreamJoin.run(client, allocator, lines);
                return;
            }
            upload(client, LINES, lines);

            attempt = "running the join at " + uri;
            FlightInfo info = runJoin(client);
            attempt = "reading the join from " + uri;
            Totals got = new Totals();
            // The endpoints are parts of one result. They are read here one by one; threads may read them at once.
            for (FlightEndpoint endpoint : info.getEndpoints()) {
                fetch(client, endpoint.getTicket(), got);
            }
            got.check(lines, LINE_COUNT);
            System.out.println(got);
        }
    }

    /** Sends one table, in place of an earlier one of its name. The table appears when the stream ends well. */
    private void upload(FlightClient client, String table, VectorSchemaRoot batch) {
        attempt = "uploading %s to %s".formatted(table, uri);
        FlightCallHeaders headers = new FlightCallHeaders();
        headers.insert("dovetail-upload-options", "{\"mode\": \"replace\"}");
        ClientStreamListener stream = client.startPut(
                FlightDescriptor.path(table), batch, new AsyncPutListener(), new HeaderCallOption(headers));
        stream.putNext();
        stream.completed();
        // The server's answer, and what it says when it refuses.
        stream.getResult();
    }

    /**
     * Starts the join and waits for its end. The server answers a poll as soon as the join ends, or after a moment. A
     * program that reads rows while they are made calls getInfo instead, and its getStream waits for the rows.
     */
    private static FlightInfo runJoin(FlightClient client) {
        PollInfo poll = client.pollInfo(FlightDescriptor.command(JOIN.getBytes(StandardCharsets.UTF_8)));
        // There is a descriptor for the next poll until the join is complete.
        while (poll.getFlightDescriptor().isPresent()) {
            poll = client.pollInfo(poll.getFlightDescriptor().get());
        }
        return poll.getFlightInfo();
    }

    /** Reads one endpoint, checks its rows and adds them up. */
    private static void fetch(FlightClient client, Ticket ticket, Totals totals) throws Exception {
        try (FlightStream stream = client.getStream(ticket)) {
            while (stream.next()) {
                totals.addAll(stream.getRoot());
            }
        }
    }

    private static VectorSchemaRoot orders(BufferAllocator allocator) {
        BigIntVector keys = new BigIntVector("o_orderkey", allocator);
        VarCharVector priorities = new VarCharVector("o_orderpriority", allocator);
        for (int order = 0; order < ORDER_COUNT; order++) {
            keys.setSafe(order, order);
            priorities.setSafe(order, priority(order).getBytes(StandardCharsets.UTF_8));
        }
        VectorSchemaRoot root = VectorSchemaRoot.of(keys, priorities);
        root.setRowCount(ORDER_COUNT);
        return root;
    }

    /** Some orders have no line, some lines no order. */
    private static VectorSchemaRoot lines(BufferAllocator allocator) {
        BigIntVector keys = new BigIntVector("l_orderkey", allocator);
        BigIntVector quantities = new BigIntVector("l_quantity", allocator);
        for (int line = 0; line < LINE_COUNT; line++) {
            keys.setSafe(line, line * 8_111L % 12_000);
            quantities.setSafe(line, line % 50 + 1);
        }
        VectorSchemaRoot root = VectorSchemaRoot.of(keys, quantities);
        root.setRowCount(LINE_COUNT);
        return root;
    }

    private static String priority(long orderkey) {
        return "priority " + (orderkey % 5 + 1);
    }

    /** The server's own sentence with the kind of error behind it; for other errors, theirs. */
    private static String describe(Exception error) {
        if (!(error instanceof FlightRuntimeException refused)) {
            return error.toString();
        }
        String sentence = "%s (%s)".formatted(refused.getMessage(), refused.status().code());
        Throwable cause = refused;
        while (cause.getCause() != null) {
            cause = cause.getCause();
        }
        // What the server said is all there is to say; why nothing could be sent is told by the first cause.
        boolean answered = cause == refused || cause instanceof StatusRuntimeException;
        return answered ? sentence : sentence + ": " + cause;
    }

    /** What the rows of a join add up to, whatever order they come in. */
    static final class Totals {
        private long rows;
        private long checksum;

        private void add(long orderkey, long quantity) {
            rows++;
            checksum += orderkey * quantity;
        }

        /** Checks the rows of a joined batch and adds them. */
        void addAll(VectorSchemaRoot batch) {
            BigIntVector keys = (BigIntVector) batch.getVector("o_orderkey");
            VarCharVector priorities = (VarCharVector) batch.getVector("o_orderpriority");
            BigIntVector quantities = (BigIntVector) batch.getVector("l_quantity");
            for (int row = 0; row < batch.getRowCount(); row++) {
                String priority = priorities.getObject(row).toString();
                if (!priority.equals(priority(keys.get(row)))) {
                    throw new IllegalStateException("order %d came back with priority \"%s\"; \"%s\" was uploaded"
                            .formatted(keys.get(row), priority, priority(keys.get(row))));
                }
                add(keys.get(row), quantities.get(row));
            }
        }

        /** Compares with the join of the first lines: each that has an order, once. */
        void check(VectorSchemaRoot lines, int count) {
            BigIntVector keys = (BigIntVector) lines.getVector("l_orderkey");
            BigIntVector quantities = (BigIntVector) lines.getVector("l_quantity");
            Totals expected = new Totals();
            for (int line = 0; line < count; line++) {
                if (keys.get(line) < ORDER_COUNT) {
                    expected.add(keys.get(line), quantities.get(line));
                }
            }
            if (rows != expected.rows || checksum != expected.checksum) {
                throw new IllegalStateException("the join has %s; %s were expected".formatted(this, expected));
            }
        }

        @Override
        public String toString() {
            return "rows=%d checksum=%d".formatted(rows, checksum);
        }
    }
}
