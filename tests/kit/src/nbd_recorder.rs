//! An NBD server that records changes of its disk in a journal, and answers them out of order (the
//! NBD specification, `doc/proto.md`).

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::journal::{Change, Journal};
use crate::random::Random;

const GREETING: &[u8; 16] = b"NBDMAGICIHAVEOPT";
/// Flags of the greeting: options have replies, and no zeroes follow.
const FIXED_NEWSTYLE: u16 = 1 << 0;
const NO_ZEROES: u16 = 1 << 1;
const OPTION_REPLY: u64 = 0x0003_e889_0455_65a9;
const GO: u32 = 7;
const ACK: u32 = 1;
const INFO: u32 = 3;
const UNSUPPORTED: u32 = (1 << 31) | 1;
/// Flags of the disk: there are flags, flushes, forced writes, trims, zeroes, several connections.
const FLAGS: u16 = 1 | 1 << 2 | 1 << 3 | 1 << 5 | 1 << 6 | 1 << 8;
const REQUEST: u32 = 0x2560_9513;
const REPLY: u32 = 0x6744_6698;
const FORCED: u16 = 1 << 0;
const READ: u16 = 0;
const WRITE: u16 = 1;
const DISCONNECT: u16 = 2;
const FLUSH: u16 = 3;
const TRIM: u16 = 4;
const WRITE_ZEROES: u16 = 6;

/// The server, which dropping ends.
pub struct NbdRecorder {
    socket: PathBuf,
    accepting: Option<JoinHandle<()>>,
    is_over: Arc<Mutex<bool>>,
}

impl NbdRecorder {
    /// Listens on `socket`, with the disk of a journal.
    ///
    /// # Errors
    /// If the socket cannot be made.
    pub fn start(socket: &Path, journal: &Arc<Journal>) -> Result<Self> {
        let listener = UnixListener::bind(socket).context("listening as an NBD server")?;
        let is_over = Arc::new(Mutex::new(false));
        let (journal, ends) = (Arc::clone(journal), Arc::clone(&is_over));
        let accepting = std::thread::spawn(move || {
            let mut connections = Vec::new();
            while let Ok((stream, _)) = listener.accept() {
                if *ends.lock().unwrap_or_else(PoisonError::into_inner) {
                    break;
                }
                let journal = Arc::clone(&journal);
                connections.push(std::thread::spawn(move || {
                    // A client may leave at any time.
                    let _ = serve(&stream, &journal);
                }));
            }
            connections.into_iter().for_each(|connection| drop(connection.join()));
        });
        Ok(Self { socket: socket.to_owned(), accepting: Some(accepting), is_over })
    }
}

impl Drop for NbdRecorder {
    /// Waits for the end of all connections, which clients close.
    fn drop(&mut self) {
        *self.is_over.lock().unwrap_or_else(PoisonError::into_inner) = true;
        let woken = UnixStream::connect(&self.socket).is_ok();
        if let Some(accepting) = self.accepting.take().filter(|_| woken) {
            let _ = accepting.join();
        }
    }
}

fn serve(stream: &UnixStream, journal: &Journal) -> Result<()> {
    negotiate(stream, journal)?;
    let (sender, answers) = mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(move || answer(stream, journal, &answers));
        let received = receive(stream, journal, &sender);
        drop(sender);
        received
    })
}

fn negotiate(mut stream: &UnixStream, journal: &Journal) -> Result<()> {
    stream.write_all(&[&GREETING[..], &(FIXED_NEWSTYLE | NO_ZEROES).to_be_bytes()].concat())?;
    take::<4>(stream)?;
    loop {
        take::<8>(stream)?;
        let option = u32::from_be_bytes(take(stream)?);
        let mut data = vec![0; u32::from_be_bytes(take(stream)?) as usize];
        stream.read_exact(&mut data)?;
        let mut reply = |kind: u32, data: &[u8]| {
            let len = u32::try_from(data.len()).unwrap_or(0);
            let words = [option, kind, len].map(u32::to_be_bytes).concat();
            stream.write_all(&[&OPTION_REPLY.to_be_bytes()[..], &words, data].concat())
        };
        if option != GO {
            reply(UNSUPPORTED, &[])?;
            continue;
        }
        let size = journal.size().to_be_bytes();
        reply(INFO, &[&[0, 0][..], &size, &FLAGS.to_be_bytes()].concat())?;
        return reply(ACK, &[]).context("answering a client");
    }
}

fn take<const BYTES: usize>(mut stream: &UnixStream) -> Result<[u8; BYTES]> {
    let mut bytes = [0; BYTES];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}

/// The number of a change, the cookie of its request, and the bytes of a read.
type Answer = (Option<usize>, [u8; 8], Vec<u8>);

fn receive(
    mut stream: &UnixStream,
    journal: &Journal,
    sender: &mpsc::Sender<Answer>,
) -> Result<()> {
    loop {
        let magic = u32::from_be_bytes(take(stream)?);
        anyhow::ensure!(magic == REQUEST, "a request begins with {magic:x}");
        let [flags, kind] = [take(stream)?, take(stream)?].map(u16::from_be_bytes);
        let (cookie, offset) = (take(stream)?, u64::from_be_bytes(take(stream)?));
        let bytes = u32::from_be_bytes(take(stream)?) as usize;
        let mut data = vec![0; if matches!(kind, FLUSH | READ) { 0 } else { bytes }];
        if kind == WRITE {
            stream.read_exact(&mut data)?;
        }
        let answer = match kind {
            DISCONNECT => return Ok(()),
            READ => (None, cookie, journal.read(offset, bytes)),
            FLUSH => (Some(journal.begin(Change::Flush, false)), cookie, Vec::new()),
            WRITE | WRITE_ZEROES | TRIM => {
                let is_forced = flags & FORCED != 0;
                (Some(journal.begin(Change::Write(offset, data), is_forced)), cookie, Vec::new())
            }
            _ => anyhow::bail!("a request of kind {kind}"),
        };
        if sender.send(answer).is_err() {
            return Ok(());
        }
    }
}

/// Answers in random order, as long as some wait.
fn answer(mut stream: &UnixStream, journal: &Journal, answers: &mpsc::Receiver<Answer>) {
    let mut random = Random::new(2);
    let mut waiting = Vec::new();
    while let Ok(first) = answers.recv() {
        waiting.push(first);
        while !waiting.is_empty() {
            // Takes requests that arrived in the meantime; the pause lets some arrive.
            std::thread::sleep(Duration::from_micros(random.below(200)));
            waiting.extend(answers.try_iter());
            let index = random.below(waiting.len() as u64);
            let (number, cookie, data) =
                waiting.swap_remove(usize::try_from(index).expect("it is an index"));
            if let Some(number) = number {
                journal.end(number);
            }
            let head = [REPLY.to_be_bytes(), [0; 4]].concat();
            // The client may have gone.
            let _ = stream.write_all(&[&head[..], &cookie, &data].concat());
        }
    }
}
