//! Memory of the messages that DoGet and DoExchange make and that are not sent yet.
//!
//! ```text
//!   room: the usual size of a message ─► message is made ─► room of its own size ─► sent
//! ```
//!
//! A client that stops reading can leave a message at any of these steps, so a message has its
//! memory from before it is made until its last piece is sent. Pieces of the arena are counted
//! there, and not here.

use std::sync::Arc;

use bytes::Bytes;

use super::call_memory::{CallShare, Counted, when_free};
use super::encode::Message;
use super::shared::Shared;
use crate::Result;
use crate::memory::{Arena, Held};

/// Memory that is taken before a message is made, in bytes: the usual size of a message. Most
/// messages consist of pieces of the arena, and give nearly all of it back.
const MAKING_BYTES: u64 = 2 << 20;

/// Limits [`MAKING_BYTES`] to the memory of calls divided by this number.
const MAKING_PART: u64 = 16;

/// Memory of the messages of one call.
#[derive(Clone, Debug)]
pub struct AnswerMemory {
    call: CallShare,
    arena: Arena,
    making_bytes: u64,
}

impl AnswerMemory {
    /// Returns the memory of the messages of a call.
    pub fn new(shared: &Shared, call: CallShare) -> Self {
        let making_bytes = MAKING_BYTES.min(shared.call_memory.whole().limit_bytes() / MAKING_PART);
        Self { call, arena: shared.catalog.arena().clone(), making_bytes }
    }

    /// Waits for room in which to make a message.
    ///
    /// # Errors
    /// [`Error::Exhausted`](crate::Error::Exhausted) when there was none for half a minute.
    pub async fn room(&self) -> Result<Room> {
        let held = when_free(|| self.call.bounds().reserve(self.making_bytes, "the answer")).await?;
        Ok(Room { held, arena: self.arena.clone() })
    }

    /// Counts a message that was made without room, as a small one may be.
    ///
    /// # Errors
    /// [`Error::Exhausted`](crate::Error::Exhausted) when there is none.
    pub fn counted(&self, message: Message) -> Result<Answer> {
        let held = self.call.bounds().reserve(message.heap_bytes(&self.arena) as u64, "the answer")?;
        Ok(Answer { message, held })
    }
}

/// Room in which one message is made.
#[derive(Debug)]
pub struct Room {
    held: Held,
    arena: Arena,
}

impl Room {
    /// Keeps as much room as the message takes.
    ///
    /// # Errors
    /// [`Error::Exhausted`](crate::Error::Exhausted) when the message is larger than the room, and
    /// there is no more.
    pub fn counted(mut self, message: Message) -> Result<Answer> {
        let bytes = message.heap_bytes(&self.arena) as u64;
        self.held.shrink_to(bytes);
        self.held.try_grow(bytes - self.held.bytes(), "the answer")?;
        Ok(Answer { message, held: self.held })
    }
}

/// Message of an answer, with its memory.
#[derive(Debug)]
pub struct Answer {
    message: Message,
    held: Held,
}

impl Answer {
    /// Returns the bytes of the message.
    pub fn bytes(&self) -> usize {
        self.message.bytes()
    }

    /// Returns the message as gRPC sends it. Its memory is given back when the last piece was sent.
    pub fn into_wire(self) -> Vec<Bytes> {
        let held = Arc::new(self.held);
        let counted = |bytes| Bytes::from_owner(Counted { bytes, _held: held.clone() });
        self.message.into_wire().into_iter().map(counted).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::array::{Int64Array, RecordBatch};
    use arrow::datatypes::{DataType, Field, Schema};

    use super::super::call_memory::CallMemory;
    use super::super::encode::Encoder;
    use super::*;
    use crate::memory::Budget;

    /// Memory of calls whose answers have room for one message that is being made.
    fn memory_of(call_memory: &CallMemory, making_bytes: u64) -> AnswerMemory {
        let arena = Arena::new(Budget::new("host memory", "--host-memory", 1 << 20));
        AnswerMemory { call: call_memory.call(None, Some("ann")).unwrap(), arena, making_bytes }
    }

    /// Message of `rows` rows, none of them in the arena.
    fn message_of(rows: i64) -> Message {
        let schema = Arc::new(Schema::new(vec![Field::new("k", DataType::Int64, false)]));
        let rows = RecordBatch::try_new(schema.clone(), vec![Arc::new(Int64Array::from_iter_values(0..rows))]);
        let (mut encoder, _) = Encoder::new(schema).unwrap();
        encoder.begin(rows.unwrap());
        encoder.next_message().unwrap().unwrap()
    }

    #[tokio::test]
    async fn a_message_has_memory_from_before_it_is_made_until_its_last_piece_is_sent() {
        let whole = CallMemory::new(1 << 20);
        let memory = memory_of(&whole, 256 << 10);
        let call_bytes = whole.whole().used_bytes();
        let used = || whole.whole().used_bytes() - call_bytes;
        let room = memory.room().await.unwrap();
        assert_eq!(used(), 256 << 10);
        // The messages of a tenant have three eighths, so there is no room for a second one.
        let mut second = Box::pin(memory.room());
        assert!(futures::poll!(&mut second).is_pending());
        let answer = room.counted(message_of(10_000)).unwrap();
        assert!((80_000..100_000).contains(&used()), "{}", used());
        assert!(second.await.is_ok(), "the message is smaller than its room");
        let mut pieces = answer.into_wire();
        let last = pieces.pop().unwrap();
        drop(pieces);
        assert!(used() > 80_000, "one piece is left");
        drop(last);
        assert_eq!(used(), 0);
    }

    #[tokio::test]
    async fn a_message_that_is_larger_than_its_room_is_refused_when_there_is_no_more() {
        let whole = CallMemory::new(1 << 20);
        let memory = memory_of(&whole, 64 << 10);
        let call_bytes = whole.whole().used_bytes();
        assert!(memory.room().await.unwrap().counted(message_of(20_000)).is_ok());
        let refusal = memory.room().await.unwrap().counted(message_of(50_000)).unwrap_err();
        assert!(refusal.message().contains("the answer"), "{refusal}");
        assert_eq!(whole.whole().used_bytes(), call_bytes);
    }
}
