//! Processes that stand still, and the heartbeats of those that do not.

use std::io::{ErrorKind, Write};

use super::*;
use crate::engine::channel::{Receiver, Sender};
use crate::engine::messages::{FromChild, Opened, ToChild};

/// Opens a device as a process does. Then reads, but sends nothing, until the socket is closed.
fn open_and_stall(socket: UnixStream) {
    let sender = Sender::new(socket.try_clone().unwrap());
    let mut messages = Receiver::new(socket);
    let Some(ToChild::Open(opening)) = messages.receive().unwrap() else {
        panic!("the first message opens the device")
    };
    let device = opening.open().unwrap();
    let (info, memory_bytes) = (DeviceInfo::of(&*device), device.memory().limit_bytes());
    let opened = Opened { info, memory_bytes, jobs_max: device.jobs_max(), window_bytes: 0 };
    sender.send(&FromChild::Opened(Ok(opened)), None).unwrap();
    while let Ok(Some(_)) = messages.receive::<ToChild>() {}
}

#[test]
fn a_process_that_stands_still_is_lost_with_its_job() {
    let (catalog, slabs) = tables();
    let (here, there) = UnixStream::pair().unwrap();
    let process = std::thread::spawn(move || open_and_stall(there));
    let opening = Opening { stall_limit: Some(Duration::from_secs(1)), ..opening() };
    let engine = ChildEngine::over(&opening, catalog.arena().clone(), &slabs, here, None).unwrap();
    let task = task_on(&engine, &catalog, JoinKind::Inner, Strategy::Hash);
    let lost = format!("the process of {} has not answered for 1 s, and was killed", opening.id);
    let outcome = run_on(&engine, &catalog, &task);
    assert!(matches!(&outcome, Err(Error::Unavailable(why)) if why.contains(&lost)), "{outcome:?}");
    assert_eq!(engine.check(), outcome.map(drop));
    process.join().unwrap();
}

#[test]
fn a_process_with_nothing_to_do_sends_heartbeats() {
    let (here, there) = UnixStream::pair().unwrap();
    let process = std::thread::spawn(move || process::serve(there));
    let (sender, mut messages) = (Sender::new(here.try_clone().unwrap()), Receiver::new(here));
    let opening = Opening { window_bytes: 0, stall_limit: Some(Duration::from_millis(20)), ..opening() };
    sender.send(&ToChild::Open(opening), None).unwrap();
    let mut heartbeats = 0;
    while heartbeats < 3 {
        let message = messages.receive().unwrap().expect("the process has not ended");
        heartbeats += u32::from(matches!(message, FromChild::Heartbeat));
    }
    sender.hang_up();
    process.join().unwrap().unwrap();
}

#[test]
fn only_reads_in_a_row_without_a_byte_are_counted_as_idle() {
    let (here, mut there) = UnixStream::pair().unwrap();
    here.set_read_timeout(Some(Duration::from_millis(1))).unwrap();
    let mut messages = Receiver::new(here);
    let receive = |messages: &mut Receiver| messages.receive::<FromChild>().map_err(|error| error.kind());
    for idle_reads in 1..=3 {
        assert!(matches!(receive(&mut messages), Err(ErrorKind::WouldBlock)));
        assert_eq!(messages.idle_reads(), idle_reads);
    }
    let heartbeat = postcard::to_allocvec(&FromChild::Heartbeat).unwrap();
    let message = [&(heartbeat.len() as u64).to_le_bytes()[..], &heartbeat].concat();
    there.write_all(&message[..3]).unwrap();
    // A part of a message is a sign of life. The read after it is idle.
    assert!(matches!(receive(&mut messages), Err(ErrorKind::WouldBlock)));
    assert_eq!(messages.idle_reads(), 1);
    there.write_all(&message[3..]).unwrap();
    assert!(matches!(receive(&mut messages), Ok(Some(FromChild::Heartbeat))));
    assert_eq!(messages.idle_reads(), 0);
}
