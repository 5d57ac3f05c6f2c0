//! A guest on a disk that an NBD server has.

use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use ringhaul_kit::server::{Cache, Engine, Export};
use ringhaul_kit::system::is_installed;
use ringhaul_tools::process::{is_listening, retry};

use super::{LIMIT, Scene, data_of, scenario};

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
    let socket = scene.sockets.path().join("nbd-server");
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "qemu-nbd", "--persistent", "--shared", "4"]);
    command.args(["--format", "raw", "--discard", "unmap", "--socket"]).arg(&socket);
    let server = command.arg(&export.file).stdin(Stdio::null()).spawn();
    let mut server = server.context("starting qemu-nbd")?;
    let listens = retry(LIMIT, || {
        ensure!(socket.exists() && is_listening(&socket)?, "qemu-nbd does not listen");
        Ok(())
    });
    let disk = Some(format!("nbd+unix:///?socket={}", socket.display()));
    let done = listens.and_then(|()| data_of(&scene, &Export { disk, ..export }));
    server.kill().context("ending qemu-nbd")?;
    server.wait().context("waiting for qemu-nbd")?;
    done
}
