//! A guest on a disk of an NBD server.

use std::path::Path;
use std::process::Command;

use anyhow::Result;
use ringhaul_kit::nbd_server::NbdServer;
use ringhaul_kit::server::{Cache, Engine, Export};
use ringhaul_kit::system::is_installed;

use super::data::data_of;
use super::{Scene, boot_fast, scenario};

/// Starts `qemu-nbd` on a file.
pub(super) fn start_server(scene: &Scene, file: &Path) -> Result<NbdServer> {
    let socket = scene.sockets.path().join("nbd-server");
    let mut command = Command::new("qemu-nbd");
    command.args(["--persistent", "--shared", "4", "--format", "raw", "--discard", "unmap"]);
    NbdServer::start(&socket, command.arg("--socket").arg(&socket).arg(file))
}

#[test]
fn data_on_an_nbd_server() -> Result<()> {
    if !is_installed("qemu-nbd") {
        return Ok(());
    }
    scenario(data)
}

fn data() -> Result<()> {
    let scene = Scene::new()?;
    let export = scene.export("nbd", Engine::IoUring, Cache::None)?;
    let server = start_server(&scene, &export.file)?;
    data_of(&scene, &Export { disk: Some(server.uri("")), ..export }, boot_fast)
}
