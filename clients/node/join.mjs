// Uploads two tables to a Dovetail server, joins them there, and checks every row that comes back.
//
//     node join.mjs grpc://127.0.0.1:8815
//
// apache-arrow has Arrow's streams, and no Flight. Flight is gRPC with the service of proto/flight.proto: a message of
// FlightData has the header and the body of one message of such a stream.

import { fileURLToPath } from "node:url";
import grpc from "@grpc/grpc-js";
import { loadSync } from "@grpc/proto-loader";
import { Int64, RecordBatchStreamWriter, Table, tableFromIPC, Utf8, vectorFromArray }
  from "apache-arrow";
import { Message } from "apache-arrow/ipc/metadata/message";

const ORDERS = "example_orders", ORDER_COUNT = 10_000;
const LINES = "example_lineitem", LINE_COUNT = 100_000;

// A command is a JSON object with one key; proto/dovetail.proto lists its fields.
const JOIN = JSON.stringify({ join: {
  left: ORDERS, right: LINES, on: [{ left: "o_orderkey", right: "l_orderkey" }],
  how: "inner", columns: ["o_orderkey", "o_orderpriority", "l_quantity"] } });

/** Makes a client of a URI such as grpc://HOST:PORT, or grpc+tls://HOST:PORT. Nothing is sent yet. */
function connect(uri) {
  const { protocol, host } = new URL(uri.replace(/^grpc(\+tcp)?:/, "http:").replace(/^grpc\+tls:/, "https:"));
  const credentials = { "http:": grpc.credentials.createInsecure, "https:": grpc.credentials.createSsl }[protocol];
  if (!credentials) throw new Error("the scheme is not grpc, grpc+tcp or grpc+tls; write a URI such as grpc://127.0.0.1:8815");
  const file = fileURLToPath(new URL("../../proto/flight.proto", import.meta.url));
  const definition = loadSync(file, { longs: Number, defaults: true, enums: String });
  const { FlightService } = grpc.loadPackageDefinition(definition).arrow.flight.protocol;
  // gRPC's own limit is 4 MiB, which a batch with a single large value may exceed.
  return new FlightService(host, credentials(), { "grpc.max_receive_message_length": -1 });
}

/** Yields the messages of an Arrow stream as FlightData. */
function* flightData(table) {
  const bytes = RecordBatchStreamWriter.writeAll(table).toUint8Array(true);
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  // A message of a stream: -1, the length of the header, the header, the body.
  for (let at = 0; at < bytes.length;) {
    const length = view.getInt32(at + 4, true);
    if (length === 0) return;
    const header = bytes.subarray(at + 8, at + 8 + length);
    const body = at + 8 + length, end = body + Number(Message.decode(header).bodyLength);
    yield { dataHeader: header, dataBody: bytes.subarray(body, end) };
    at = end;
  }
}

/** Makes an Arrow table of messages. */
function tableOf(messages) {
  const parts = messages.flatMap(({ dataHeader, dataBody }) => {
    const prefix = Buffer.alloc(8);
    prefix.writeInt32LE(-1, 0);
    prefix.writeInt32LE(dataHeader.length, 4);
    return [prefix, dataHeader, dataBody];
  });
  return tableFromIPC(Buffer.concat([...parts, Buffer.from([255, 255, 255, 255, 0, 0, 0, 0])]));
}

/** Sends one table, in place of an earlier one of its name. The table appears when the stream ends well. */
function upload(client, name, table) {
  const metadata = new grpc.Metadata();
  metadata.set("dovetail-upload-options", JSON.stringify({ mode: "replace" }));
  return new Promise((resolve, reject) => {
    const call = client.DoPut(metadata);
    call.on("error", reject).on("data", () => {}).on("end", resolve);
    let descriptor = { type: "PATH", path: [name] };
    for (const message of flightData(table)) {
      call.write({ ...message, flightDescriptor: descriptor });
      descriptor = undefined;
    }
    call.end();
  });
}

/** Starts the join and waits for its end. The server answers a poll as soon as the join ends, or after a moment. */
async function runJoin(client) {
  let descriptor = { type: "CMD", cmd: Buffer.from(JOIN) };
  for (;;) {
    const poll = await new Promise((resolve, reject) =>
      client.PollFlightInfo(descriptor, (error, answer) => (error ? reject(error) : resolve(answer))));
    // The descriptor of the next poll, until the join is complete.
    if (!poll.flightDescriptor) return poll.info;
    descriptor = poll.flightDescriptor;
  }
}

/** Reads one endpoint of a result. */
async function fetchPart(client, ticket) {
  const messages = [];
  for await (const message of client.DoGet(ticket)) messages.push(message);
  return tableOf(messages);
}

const priority = (orderkey) => `priority ${(orderkey % 5n) + 1n}`;

/** Makes both tables, and what their join has to come to. Some orders have no line, some lines no order. */
function tables() {
  const numbers = (count, value) => vectorFromArray(Array.from({ length: count }, (_, at) => BigInt(value(at))), new Int64());
  const keys = numbers(ORDER_COUNT, (at) => at);
  const orders = new Table({
    o_orderkey: keys,
    o_orderpriority: vectorFromArray([...keys].map(priority), new Utf8()),
  });
  const lines = new Table({
    l_orderkey: numbers(LINE_COUNT, (at) => (at * 8_111) % 12_000),
    l_quantity: numbers(LINE_COUNT, (at) => (at % 50) + 1),
  });
  const expected = { rows: 0, checksum: 0n };
  for (const { l_orderkey: key, l_quantity: quantity } of lines) {
    if (key < ORDER_COUNT) add(expected, key, quantity);
  }
  return { orders, lines, expected };
}

function add(sum, orderkey, quantity) {
  sum.rows += 1;
  sum.checksum += orderkey * quantity;
}

async function attempt(what, work) {
  try {
    return await work;
  } catch (error) {
    throw new Error(`${what}: ${error.details ?? error.message}`);
  }
}

async function run(uri) {
  const client = await attempt(`connecting to ${uri}`, (async () => connect(uri))());
  const { orders, lines, expected } = tables();
  await attempt(`uploading ${ORDERS} to ${uri}`, upload(client, ORDERS, orders));
  await attempt(`uploading ${LINES} to ${uri}`, upload(client, LINES, lines));
  const info = await attempt(`running the join at ${uri}`, runJoin(client));
  // The endpoints are parts of one result, and are read at once.
  const parts = await attempt(`reading the join from ${uri}`,
    Promise.all(info.endpoint.map(({ ticket }) => fetchPart(client, ticket))));
  const got = { rows: 0, checksum: 0n };
  for (const row of parts.flatMap((part) => [...part])) {
    if (row.o_orderpriority !== priority(row.o_orderkey)) {
      throw new Error(`order ${row.o_orderkey} came back with priority ${row.o_orderpriority}`);
    }
    add(got, row.o_orderkey, row.l_quantity);
  }
  if (got.rows !== expected.rows || got.checksum !== expected.checksum) {
    throw new Error(`the join has ${got.rows} rows with checksum ${got.checksum}; ` +
      `${expected.rows} with checksum ${expected.checksum} were expected`);
  }
  return got;
}

if (process.argv.length !== 3) {
  console.error("usage: node join.mjs URI, such as: node join.mjs grpc://127.0.0.1:8815");
  process.exit(2);
}
try {
  const { rows, checksum } = await run(process.argv[2]);
  console.log(`rows=${rows} checksum=${checksum}`);
  process.exit(0);
} catch (error) {
  console.error(`join: ${error.message}`);
  process.exit(1);
}
