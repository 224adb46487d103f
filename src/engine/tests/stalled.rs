//! Processes that stand still, and the heartbeats of those that do not.

use std::io::{ErrorKind, Write};
use std::sync::mpsc;

use super::*;
use crate::device::PeerOps;
use crate::engine::channel::{Receiver, Sender};
use crate::engine::messages::{FromChild, Opened, ToChild};

/// Opens a device as a process does.
fn open(socket: UnixStream) -> (Arc<dyn Device>, Sender, Receiver) {
    let sender = Sender::new(socket.try_clone().unwrap());
    let mut messages = Receiver::new(socket);
    let Some(ToChild::Open(opening)) = messages.receive().unwrap() else {
        panic!("the first message opens the device")
    };
    let device = opening.open().unwrap();
    let (info, memory_bytes) = (DeviceInfo::of(&*device), device.memory().limit_bytes());
    let window_bytes = opening.window_bytes;
    let opened = Opened { info, memory_bytes, jobs_max: device.jobs_max(), window_bytes };
    let file = device.peers().and_then(PeerOps::window_file).filter(|_| window_bytes > 0);
    sender.send(&FromChild::Opened(Ok(opened)), file).unwrap();
    (device, sender, messages)
}

/// Opens a device as a process does. Then reads, but sends nothing, until the socket is closed.
fn open_and_stall(socket: UnixStream) {
    let (_device, _sender, mut messages) = open(socket);
    while let Ok(Some(_)) = messages.receive::<ToChild>() {}
}

/// Opens a device as a process does. Counts requests to map a window, and answers each only after a
/// turn is given.
fn open_and_map_in_turns(socket: UnixStream, requests: &AtomicUsize, turns: &mpsc::Receiver<()>) {
    let (device, sender, mut messages) = open(socket);
    while let Ok(Some(message)) = messages.receive::<ToChild>() {
        let ToChild::MapWindow { question, peer, bytes, pattern, .. } = message else { continue };
        let file = messages.file().unwrap();
        requests.fetch_add(1, Ordering::Relaxed);
        if turns.recv().is_err() {
            return;
        }
        let outcome = map_and_write(&*device, peer, PeerWindow::Device { file, bytes }, pattern);
        sender.send(&FromChild::WindowChecked { question, outcome }, None).unwrap();
    }
}

#[test]
fn a_process_that_stands_still_is_lost_with_its_job() {
    let (catalog, slabs) = tables();
    let (here, there) = UnixStream::pair().unwrap();
    let process = std::thread::spawn(move || open_and_stall(there));
    let opening = Opening { window_bytes: 0, stall_limit: Some(Duration::from_secs(1)), ..opening() };
    let engine = ChildEngine::over(&opening, catalog.arena().clone(), &slabs, here, None).unwrap();
    let task = task_on(&engine, &catalog, JoinKind::Inner, Strategy::Hash);
    let lost = format!("the process of {} has not answered for 1 s, and was killed", opening.id);
    let outcome = run_on(&engine, &catalog, &task);
    assert!(matches!(&outcome, Err(Error::Unavailable(why)) if why.contains(&lost)), "{outcome:?}");
    assert_eq!(engine.check(), outcome.map(drop));
    process.join().unwrap();
}

/// A cancelled gang ends while a process still maps a window. The process writes its pattern later,
/// so the next gang waits before it uses that window.
#[test]
fn a_gang_that_is_cancelled_while_a_pair_is_checked_ends_at_once() {
    let (catalog, slabs) = tables();
    let (here, there) = UnixStream::pair().unwrap();
    let (requests, (turn, turns)) = (Arc::new(AtomicUsize::new(0)), mpsc::channel());
    let counted = requests.clone();
    let process = std::thread::spawn(move || open_and_map_in_turns(there, &counted, &turns));
    let slow = ChildEngine::over(&opening(), catalog.arena().clone(), &slabs, here, None).unwrap();
    let in_process = |index: u16| -> Arc<dyn Engine> {
        let id = DeviceId { index, ..opening().id };
        let device = Opening { id, ..opening() }.open().unwrap();
        Arc::new(InProcess::new(device, catalog.arena().clone()))
    };
    let (slow, owner, other): (Arc<dyn Engine>, _, _) = (Arc::new(slow), in_process(1), in_process(2));
    let connect = |writer: &Arc<dyn Engine>, owner: &Arc<dyn Engine>, cancel: CancelFlag| {
        let engines = [writer.clone(), owner.clone()];
        std::thread::spawn(move || windows::connect_all(&[&*engines[0], &*engines[1]], &cancel))
    };
    let end_of = |gang: JoinHandle<Result<bool>>| {
        wait_until("the end of the gang", || gang.is_finished());
        gang.join().unwrap()
    };
    let cancelled = |outcome: &Result<bool>| matches!(outcome, Err(Error::Cancelled(_)));

    let cancel = CancelFlag::new();
    let gang = connect(&slow, &owner, cancel.clone());
    wait_until("the request", || requests.load(Ordering::Relaxed) == 1);
    cancel.raise();
    let outcome = end_of(gang);
    assert!(cancelled(&outcome), "{outcome:?}");

    // The flag is raised at a later look than two devices that wait for nothing need.
    let outcome = end_of(connect(&other, &owner, CancelFlag::raised_at_look(100)));
    assert!(cancelled(&outcome), "{outcome:?}");
    assert_eq!(peer_access(&*other, &*owner), Ok(None), "nothing was written to the window");

    turn.send(()).unwrap();
    assert_eq!(end_of(connect(&other, &owner, CancelFlag::new())), Ok(true));
    // The pair that was not checked is checked again.
    assert_eq!(peer_access(&*slow, &*owner), Ok(None));
    let gang = connect(&slow, &owner, CancelFlag::new());
    wait_until("the second request", || requests.load(Ordering::Relaxed) == 2);
    // It ends with the process, too.
    drop(turn);
    let outcome = end_of(gang);
    assert!(matches!(&outcome, Err(Error::Unavailable(why)) if why.contains("has ended")), "{outcome:?}");
    assert_eq!(end_of(connect(&other, &owner, CancelFlag::new())), Ok(true));
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
