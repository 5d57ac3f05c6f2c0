//! An image whose file is locked late: another process may change all of it between two uses. Each
//! use opens the image again, as if it had never been open here, and closes it at the end.

use std::rc::Rc;
use std::sync::Arc;

use blockio::disk::{Abilities, DiskInfo, DiskState, Link, Placement, SizeProbe, smaller};
use blockio::driver::{Driver, DriverSource};
use blockio::executor::Lock;
use blockio::{DiskSource, EngineKind, Error, Io};

use super::consistency::refused;
use super::core::Layer;
use super::owner::{self, Image, Job};
use super::storage::adopt_file_size;

/// An open image.
#[derive(Debug)]
pub(super) struct Opened {
    pub(super) info: DiskInfo,
    /// Dropped before `source`, which waits for the end of the thread if it is the last user.
    pub(super) image: Arc<Image>,
    pub(super) source: Arc<dyn DriverSource>,
}

/// Opens an image. With `true` it is not read until the first request.
type Open = fn(Vec<Layer>, bool) -> Result<Opened, Error>;

/// Opens the disk in an image for a [`LateLock`](blockio::disk::LateLock). Only the headers are
/// read before the first use.
pub(super) fn open_with(layers: Vec<Layer>, open: Open) -> Result<DiskSource, Error> {
    let opened = open(layers, true)?;
    // Its thread would read the image at the first job.
    opened.image.end();
    let info = opened.info;
    let late = LateSource {
        below: opened.image.core.source().clone(),
        identity: opened.source.identity().to_owned(),
        info,
        open,
        state: Arc::new(Lock::new(State { opened: Arc::new(opened), is_in_use: false })),
    };
    Ok(DiskSource::from_driver(info, Arc::new(late)))
}

#[derive(Debug)]
struct LateSource {
    below: DiskSource,
    identity: String,
    /// The properties at the first opening, which front-ends know.
    info: DiskInfo,
    open: Open,
    state: Arc<Lock<State>>,
}

#[derive(Debug)]
struct State {
    /// The image of the last use. Its thread has ended if the image is not in use.
    opened: Arc<Opened>,
    is_in_use: bool,
}

impl LateSource {
    /// The image of this use, or the last one.
    fn opened(&self) -> Arc<Opened> {
        Arc::clone(&self.state.lock().opened)
    }

    fn source(&self) -> Arc<dyn DriverSource> {
        Arc::clone(&self.state.lock().opened.source)
    }

    /// Fails unless the image is in use, so that its file is locked.
    fn check_in_use(&self) -> Result<(), Error> {
        match self.state.lock().is_in_use {
            true => Ok(()),
            false => Err(refused(
                &self.below,
                "it is not locked now, and another host may use it; resize it with `qemu-img \
                 resize`, or while its front-end runs"
                    .to_owned(),
            )),
        }
    }

    /// Reads the headers of all layers again. The image has the same layers, for their files are
    /// open.
    fn read_layers(&self) -> Result<Vec<Layer>, Error> {
        let opened = self.opened();
        let layers = opened.image.core.layers.iter().map(|layer| {
            let Layer { source, header } = layer;
            let Some(header) = header else { return Ok(Layer::raw(source.clone())) };
            adopt_file_size(source)?;
            let now = Layer::qcow2(source.clone())?;
            match now.backing() == header.backing.as_ref() {
                true => Ok(now),
                false => Err(refused(
                    source,
                    "it has another backing file now; start this daemon again".to_owned(),
                )),
            }
        });
        layers.collect()
    }
}

impl DriverSource for LateSource {
    fn below(&self) -> Option<&DiskSource> {
        Some(&self.below)
    }

    fn attach(&self, io: &Rc<Io>, engine: Option<EngineKind>) -> Box<dyn Driver> {
        self.source().attach(io, engine)
    }

    /// Opens the image for reading, as it is now.
    fn reopen_for_probe(&self) -> Result<Option<DiskSource>, Error> {
        self.source().reopen_for_probe()
    }

    fn chain(&self) -> Vec<Link> {
        self.source().chain()
    }

    fn identity(&self) -> &str {
        &self.identity
    }

    fn place(&self) -> Option<Placement> {
        self.source().place()
    }

    fn abilities(&self) -> Abilities {
        self.source().abilities()
    }

    fn discard_bytes(&self) -> Option<u32> {
        self.source().discard_bytes()
    }

    fn state(&self) -> DiskState {
        self.source().state()
    }

    fn warning(&self) -> Option<String> {
        self.source().warning()
    }

    fn is_flushed(&self) -> bool {
        self.source().is_flushed()
    }

    fn abandon(&self) {
        self.source().abandon();
    }

    fn is_written_back(&self) -> bool {
        self.source().is_written_back()
    }

    fn write_back(&self) -> Result<(), Error> {
        self.source().write_back()
    }

    fn release_lock(&self) {
        self.source().release_lock();
    }

    fn changes_users(&self) -> bool {
        self.below.late_lock().is_some()
    }

    fn begin_use(&self) -> Result<(), Error> {
        self.below.hand_over().begin_use()?;
        let known = self.source().known_size()?;
        let opened = (self.open)(self.read_layers()?, false)?;
        let info = opened.info;
        // The header has the size, wherever the image is.
        if info.size_bytes < known {
            return Err(refused(&self.below, smaller(info.size_bytes, known)));
        }
        if info.logical_block_bytes != self.info.logical_block_bytes {
            let reason = format!(
                "its logical block has {} bytes, and the front-end knows it with {}; start this \
                 daemon and the front-end again",
                info.logical_block_bytes, self.info.logical_block_bytes
            );
            return Err(refused(&self.below, reason));
        }
        if let Some(warning) = opened.source.warning() {
            tracing::warn!("{}: {warning}", self.below.chain_text());
        }
        *self.state.lock() = State { opened: Arc::new(opened), is_in_use: true };
        Ok(())
    }

    fn end_use(&self) -> Result<(), Error> {
        let opened = {
            let mut state = self.state.lock();
            state.is_in_use = false;
            Arc::clone(&state.opened)
        };
        if opened.image.core.may_be_marked {
            // If this fails, the next process finds the mark.
            let _ = owner::run_job_blocking(&opened.image.owner, Job::Quiesce);
        }
        opened.image.end();
        self.below.hand_over().end_use()
    }

    /// Finds the size that another process may have given the disk. Requests for space are those of
    /// the image.
    fn size_probe(&self) -> Option<Arc<SizeProbe>> {
        let state = Arc::clone(&self.state);
        Some(Arc::new(SizeProbe::other(move || {
            let source = Arc::clone(&state.lock().opened.source);
            if let Some(space) = source.size_probe() {
                space.size_bytes()?;
            }
            source.known_size().map(Some).map_err(std::io::Error::other)
        })))
    }

    fn probe_size(&self) -> Result<u64, Error> {
        self.source().probe_size()
    }

    fn probe_space(&self) -> Result<(), Error> {
        self.source().probe_space()
    }

    fn known_size(&self) -> Result<u64, Error> {
        self.source().known_size()
    }

    fn check_new_size(&self, size_bytes: u64) -> Result<(), Error> {
        self.check_in_use()?;
        self.source().check_new_size(size_bytes)
    }

    fn set_size(&self, size_bytes: u64) -> Result<(), Error> {
        self.check_in_use()?;
        self.source().set_size(size_bytes)
    }

    fn adopt_size(&self, size_bytes: u64) {
        self.source().adopt_size(size_bytes);
    }
}
