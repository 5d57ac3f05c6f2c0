//! NBD with TLS: what is encrypted, and who is believed to be whom.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};
use ringhaul_kit::cli::{ringhaul, run};
use ringhaul_kit::nbd::Peer;
use ringhaul_kit::system::is_installed;

use super::nbd::{drive, scene};

/// Certificates of an authority, a server and a client, made for this test.
fn certificates(folder: &Path) -> Result<()> {
    std::fs::create_dir(folder)?;
    let openssl = |words: &str| -> Result<()> {
        let mut command = Command::new("openssl");
        command.current_dir(folder).args(words.split_whitespace());
        run(&mut command)?.expect_code(0).map(drop)
    };
    let request = "req -newkey rsa:2048 -nodes -keyout";
    openssl(&format!("{request} ca-key.pem -x509 -days 2 -subj /CN=authority -out ca-cert.pem"))?;
    for name in ["server", "client"] {
        let names = "subjectAltName=DNS:storage.test\n";
        std::fs::write(folder.join("extensions"), names)?;
        openssl(&format!("{request} {name}-key.pem -subj /CN={name} -out {name}.csr"))?;
        openssl(&format!(
            "x509 -req -days 2 -in {name}.csr -CA ca-cert.pem -CAkey ca-key.pem \
             -CAcreateserial -extfile extensions -out {name}-cert.pem"
        ))?;
    }
    Ok(())
}

fn refused(disk: &str, words: &str) -> Result<()> {
    run(ringhaul()?.args(["disk", "info", disk]))?
        .expect_refusal(&[words])
        .context(words.to_owned())
}

#[test]
fn connections_are_encrypted_and_certificates_checked() -> Result<()> {
    if !is_installed("nbdkit") || !is_installed("openssl") {
        return Ok(());
    }
    let scene = scene()?;
    let (pki, other) = (scene.path("pki"), scene.path("other"));
    certificates(&pki)?;
    certificates(&other)?;
    let folder = format!("--tls-certificates={}", pki.display());
    let peer =
        Peer::nbdkit(&scene, &["--tls=require", "--tls-verify-peer", &folder, "memory", "64M"])?;
    let socket = scene.socket("nbd");
    let uri = |pki: &Path, host: &str| {
        let (socket, pki) = (socket.display(), pki.display());
        format!("nbds+unix:///?socket={socket}&tls-certificates={pki}&tls-hostname={host}")
    };
    drive(&scene, &uri(&pki, "storage.test"), "--number_ios 3000")?;
    for (disk, words) in [
        (peer.uri(""), "it wants TLS; use nbds://"),
        (uri(&other, "storage.test"), "cannot agree on TLS with the server"),
        (uri(&pki, "elsewhere.test"), "cannot agree on TLS with the server"),
        (uri(Path::new("/nowhere"), "storage.test"), "cannot open /nowhere/ca-cert.pem"),
    ] {
        refused(&disk, words)?;
    }
    Ok(())
}
