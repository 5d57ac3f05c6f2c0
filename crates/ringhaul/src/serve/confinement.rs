//! The sandbox of a daemon, from its options and exports.

use anyhow::Result;
use disks::spec::DiskPlace;

use crate::daemon::saved_state;
use crate::log;
use crate::options::ServeArgs;
use crate::options::config::{Config, ConfigFile};
use crate::sandbox::{self, Rules};
use crate::spec::values::MetricsAddress;
use crate::spec::{EndpointSpec, ExportSpec};

/// Enters the sandbox for these options and exports, and starts the thread of the log.
/// The process must have a single thread.
///
/// # Errors
///
/// When the daemon cannot be confined as `--sandbox` demands.
pub fn enter_sandbox(
    args: &ServeArgs,
    config: Option<&(ConfigFile, Config)>,
    exports: &[ExportSpec],
) -> Result<()> {
    let mut rules = Rules::default();
    args.control.iter().for_each(|path| rules.socket(path));
    if let Some(path) = saved_state::place(args.state.as_deref(), args.control.as_deref())? {
        rules.replaced(&path);
    }
    match &args.metrics {
        Some(MetricsAddress::Tcp(address)) => rules.listen(address.port()),
        Some(MetricsAddress::Unix(path)) => rules.socket(path),
        None => {}
    }
    args.allow_disk_dir.iter().for_each(|folder| rules.disk_folder(folder));
    args.allow_socket_dir.iter().for_each(|folder| rules.socket_folder(folder));
    if args.confinement.allow_network {
        rules.any_server();
    }
    exports.iter().for_each(|export| permit(&mut rules, export));
    args.confinement.keep_capability.iter().for_each(|kept| rules.keep(*kept));
    sandbox::confine(args.confinement.sandbox, rules, config.map(|(file, _)| file.path()))?;
    log::start_writing()
}

/// Permits everything that an export needs.
fn permit(rules: &mut Rules, export: &ExportSpec) {
    if let EndpointSpec::Path(path) = &export.endpoint {
        rules.socket(path);
    }
    for (disk, settings) in export.disks() {
        for place in disk.places() {
            match place {
                DiskPlace::Data(path) => rules.disk(&path, !settings.read_only),
                DiskPlace::Read(path) => rules.read(&path),
                DiskPlace::ReadFolder(path) => rules.read_folder(&path),
                DiskPlace::ReadAnywhere => rules.read_folder("/".as_ref()),
                DiskPlace::LocalServer(_) => rules.local_server(),
                DiskPlace::Server(port) => rules.server(port),
                DiskPlace::Ceph(files) => rules.ceph(&files),
            }
        }
    }
    for (path, is_replaced) in export.reservations() {
        if is_replaced {
            rules.replaced(&path);
        } else {
            rules.disk(&path, true);
        }
    }
}
