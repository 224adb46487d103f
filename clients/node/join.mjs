// Uploads two tables to a Dovetail server, joins them there, and checks every row that comes back. With stream, it
// uploads one table, and sends the rows of the other while the join runs.
//
//     node join.mjs grpc://127.0.0.1:8815
//     node join.mjs stream grpc://127.0.0.1:8815
//
// apache-arrow has Arrow's streams, and no Flight. Flight is gRPC with the service of proto/flight.proto: a message of
// FlightData has the header and the body of one message of such a stream.

import { once } from "node:events";
import { fileURLToPath } from "node:url";
import grpc from "@grpc/grpc-js";
import { loadSync } from "@grpc/proto-loader";
import { Int64, RecordBatchStreamWriter, Table, tableFromIPC, Utf8, vectorFromArray }
  from "apache-arrow";
import { Message } from "apache-arrow/ipc/metadata/message";

const ORDERS = "example_orders", ORDER_COUNT = 10_000;
const LINES = "example_lineitem", LINE_COUNT = 100_000;

// A command is a JSON object with one key; proto/dovetail.proto lists its fields.
const COMMON = {
  left: ORDERS, on: [{ left: "o_orderkey", right: "l_orderkey" }],
  how: "inner", columns: ["o_orderkey", "o_orderpriority", "l_quantity"] };
const JOIN = JSON.stringify({ join: { ...COMMON, right: LINES } });

// The rows of the right side arrive in the call. Its name is a label for columns and errors, and names no table.
const STREAM_JOIN = JSON.stringify({ join: { ...COMMON, right: "lines", stream: "right" } });
const QUESTION_ROWS = 20, BATCH_ROWS = 1_000;

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

/**
 * Joins the uploaded orders with lines that are sent in one call. Asks for the first lines and waits for the answer.
 * Then sends all lines, and reads what they join with in the meantime.
 */
async function streamJoin(client, lines) {
  const call = client.DoExchange();
  try {
    const arriving = call[Symbol.asyncIterator]();
    const [schema] = flightData(lines.slice(0, 0));
    call.write({ ...schema, flightDescriptor: { type: "CMD", cmd: Buffer.from(STREAM_JOIN) } });
    const { value: joinedSchema } = await arriving.next();
    const read = async (question) => {
      const sum = { rows: 0, checksum: 0n };
      for (;;) {
        const { value: message, done } = await arriving.next();
        if (done) return sum;
        addAll(sum, tableOf([joinedSchema, message]));
        // After the last row of an answer, the server sends a batch without rows with the app_metadata of the question.
        // It also sends batches without rows while there is nothing else.
        if (question && question.equals(message.appMetadata)) return sum;
      }
    };
    const send = async (rows, appMetadata) => {
      const [, batch] = flightData(rows);
      // False while the server does not take further rows.
      if (!call.write({ ...batch, appMetadata })) await once(call, "drain");
    };
    const sendAll = async () => {
      for (let first = 0; first < lines.numRows; first += BATCH_ROWS) {
        await send(lines.slice(first, first + BATCH_ROWS));
      }
      // Only now does the server end the joined rows.
      call.end();
    };

    const question = Buffer.from("question 1");
    await send(lines.slice(0, QUESTION_ROWS), question);
    const answer = await read(question);
    // In parallel, so that neither side waits: the server stops reading while the joined rows are not read.
    const [all] = await Promise.all([read(), sendAll()]);
    return { answer, all };
  } finally {
    // If the call has not ended, this cancels it, and with it the join.
    call.cancel();
  }
}

const priority = (orderkey) => `priority ${(orderkey % 5n) + 1n}`;

/** Makes both tables. Some orders have no line, some lines no order. */
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
  return { orders, lines };
}

/** Compares with the join of lines: each line that has an order, once. */
function check(got, lines) {
  const expected = { rows: 0, checksum: 0n };
  for (const { l_orderkey: key, l_quantity: quantity } of lines) {
    if (key < ORDER_COUNT) add(expected, key, quantity);
  }
  if (got.rows !== expected.rows || got.checksum !== expected.checksum) {
    throw new Error(`the join has ${got.rows} rows with checksum ${got.checksum}; ` +
      `${expected.rows} with checksum ${expected.checksum} were expected`);
  }
}

/** Checks the rows of a part of the join and adds them. */
function addAll(sum, part) {
  for (const { o_orderkey: key, o_orderpriority: got, l_quantity: quantity } of part) {
    if (got !== priority(key)) throw new Error(`order ${key} came back with priority ${got}`);
    add(sum, key, quantity);
  }
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

async function run(uri, streams) {
  const client = await attempt(`connecting to ${uri}`, (async () => connect(uri))());
  const { orders, lines } = tables();
  await attempt(`uploading ${ORDERS} to ${uri}`, upload(client, ORDERS, orders));
  if (streams) {
    const { answer, all } = await attempt(`streaming lines to ${uri}`, streamJoin(client, lines));
    check(answer, lines.slice(0, QUESTION_ROWS));
    check(all, lines);
    return `answer ${inWords(answer)}\n${inWords(all)}`;
  }
  await attempt(`uploading ${LINES} to ${uri}`, upload(client, LINES, lines));
  const info = await attempt(`running the join at ${uri}`, runJoin(client));
  // The endpoints are parts of one result, and are read at once.
  const parts = await attempt(`reading the join from ${uri}`,
    Promise.all(info.endpoint.map(({ ticket }) => fetchPart(client, ticket))));
  const got = { rows: 0, checksum: 0n };
  for (const part of parts) addAll(got, part);
  check(got, lines);
  return inWords(got);
}

const inWords = ({ rows, checksum }) => `rows=${rows} checksum=${checksum}`;

const [uri, ...rest] = process.argv.slice(2).reverse();
const streams = rest.length === 1 && rest[0] === "stream";
if (!uri || (rest.length > 0 && !streams)) {
  console.error("usage: node join.mjs [stream] URI, such as: node join.mjs grpc://127.0.0.1:8815");
  process.exit(2);
}
try {
  console.log(await run(uri, streams));
  process.exit(0);
} catch (error) {
  console.error(`join: ${error.message}`);
  process.exit(1);
}
