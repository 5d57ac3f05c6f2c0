//! The log of written pages of a front-end that moves its guest.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};

use super::memory::memfd;
use super::message::{Message, code};
use super::protocol_feature;
use super::ring::Desc;
use super::{BORDER, DATA, Frontend, MEMORY_END, MEMORY_START, Setup, blk, feature};
use crate::daemon::pattern;

/// The bytes of guest memory for which a mark stands.
const PAGE_BYTES: u64 = 4096;
/// The bytes of a log for the whole memory, in whole pages.
const LOG_BYTES: u64 = (MEMORY_END / PAGE_BYTES / 8).next_multiple_of(PAGE_BYTES);
/// In the flags of SET_VRING_ADDR: the used ring has an address in the log.
const VRING_F_LOG: u32 = 1;

/// A log that a daemon marks.
struct WriteLog {
    file: Arc<OwnedFd>,
}

impl WriteLog {
    /// Turns the log on, for all that the device writes.
    fn begin(frontend: &mut Frontend) -> Result<Self> {
        let file = Arc::new(memfd(LOG_BYTES)?);
        let body = [LOG_BYTES.to_ne_bytes(), 0_u64.to_ne_bytes()].concat();
        let message = Message::new(code::SET_LOG_BASE, body).with_fd(&file);
        frontend.exchange(&message).context("the answer to SET_LOG_BASE")?;
        for queue in 0..frontend.rings.len() {
            let mut message = frontend.address_message(queue)?;
            message.body[4..8].copy_from_slice(&VRING_F_LOG.to_ne_bytes());
            let used_ring = frontend.rings[queue].config.used_ring;
            message.body[32..40].copy_from_slice(&used_ring.to_ne_bytes());
            frontend.send_checked(message)?;
        }
        Ok(Self { file })
    }

    /// Runs a chain that is in descriptor 0 of a queue. Checks that each page that has changed
    /// since is marked, except that of the avail ring, which the driver writes. Returns the marks.
    fn run(&mut self, frontend: &mut Frontend, queue: usize) -> Result<Vec<u64>> {
        let before = memory(frontend)?;
        self.take_marks()?;
        let ring = &mut frontend.rings[queue];
        ring.submit(0)?;
        ring.wait_used()?;
        let by_driver = ring.config.avail_ring / PAGE_BYTES * PAGE_BYTES;
        let now = memory(frontend)?;
        let marked = self.take_marks()?;
        let page_bytes = usize::try_from(PAGE_BYTES)?;
        let pairs = before.chunks(page_bytes).zip(now.chunks(page_bytes));
        for ((before, now), page) in pairs.zip(0_u64..) {
            let addr = MEMORY_START + page * PAGE_BYTES;
            ensure!(
                before == now || marked.contains(&addr) || by_driver == addr,
                "the page at {addr:#x} has changed without a mark; marked: {marked:x?}"
            );
        }
        Ok(marked)
    }

    /// Takes all marks away, and returns the guest addresses of their pages.
    fn take_marks(&self) -> Result<Vec<u64>> {
        let file = File::from(self.file.try_clone().context("duplicating the log")?);
        let mut marks = vec![0; usize::try_from(LOG_BYTES)?];
        file.read_exact_at(&mut marks, 0).context("reading the log")?;
        file.write_all_at(&vec![0; marks.len()], 0).context("clearing the log")?;
        let pages = (0..LOG_BYTES * 8).filter(|page| {
            let byte = usize::try_from(page / 8).map(|at| marks[at]);
            byte.is_ok_and(|byte| byte & (1 << (page % 8)) != 0)
        });
        Ok(pages.map(|page| page * PAGE_BYTES).collect())
    }
}

/// Checks that a disk marks all that its requests write to guest memory: reads into buffers with
/// and without the alignment of files, in pieces and across pages, after writes of the same data.
///
/// # Errors
/// If a page has changed without a mark, or data differs.
pub fn check_marks(socket: &Path) -> Result<()> {
    let mut setup = Setup::default();
    setup.protocol_features = setup.protocol_features.map(|all| all | protocol_feature::LOG_SHMFD);
    // Marks begin with the log.
    setup.features |= feature::LOG_ALL;
    let mut frontend = Frontend::attach(socket, &setup)?;
    let mut log = WriteLog::begin(&mut frontend)?;
    let (sector, bytes) = (40, 64 << 10);
    let content = pattern(sector, bytes);
    frontend.write(1, sector, &content)?;
    for start in [DATA, DATA + 512, DATA + 8, DATA + 4095, BORDER - 8000] {
        for piece in [bytes, 20_001] {
            read(&mut frontend, &mut log, sector, &content, start, piece)
                .with_context(|| format!("reading to {start:#x}, in pieces of {piece} bytes"))?;
        }
    }
    for kind in [blk::FLUSH, blk::GET_ID] {
        let (header, status) = frontend.put_header(0, 0, kind, 0)?;
        let answer = Desc::writable(DATA, 20);
        let mut chain = vec![Desc::readable(header, 16)];
        chain.extend((kind == blk::GET_ID).then_some(answer));
        chain.push(Desc::writable(status, 1));
        frontend.memory.write(DATA, &[0x77; 20])?;
        frontend.rings[0].put_chain(0, &chain);
        log.run(&mut frontend, 0).with_context(|| format!("a request of type {kind}"))?;
        ensure!(frontend.status(0, 0) == Some(blk::OK), "a request of type {kind} has failed");
    }
    Ok(())
}

/// Reads into buffers of `piece` bytes, one behind another.
fn read(
    frontend: &mut Frontend,
    log: &mut WriteLog,
    sector: u64,
    content: &[u8],
    start: u64,
    piece: usize,
) -> Result<()> {
    let (header, status) = frontend.put_header(0, 0, blk::IN, sector)?;
    let mut chain = vec![Desc::readable(header, 16)];
    for offset in (0..content.len()).step_by(piece) {
        let bytes = piece.min(content.len() - offset);
        chain.push(Desc::writable(start + u64::try_from(offset)?, u32::try_from(bytes)?));
    }
    chain.push(Desc::writable(status, 1));
    // Each byte of the data changes.
    let different: Vec<u8> = content.iter().map(|byte| !byte).collect();
    frontend.memory.write(start, &different)?;
    frontend.rings[0].put_chain(0, &chain);
    let marked = log.run(frontend, 0)?;
    ensure!(frontend.status(0, 0) == Some(blk::OK), "the read has failed");
    ensure!(frontend.memory.read(start, content.len())? == content, "it reads otherwise");
    let pages = content.len() / usize::try_from(PAGE_BYTES)?;
    ensure!(marked.len() >= pages, "{} marks for {pages} pages", marked.len());
    Ok(())
}

/// The whole of guest memory.
fn memory(frontend: &Frontend) -> Result<Vec<u8>> {
    frontend.memory.read(MEMORY_START, usize::try_from(MEMORY_END - MEMORY_START)?)
}
