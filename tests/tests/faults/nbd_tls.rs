//! NBD with TLS: encryption, and checks of certificates.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use ringhaul_kit::cli::{ringhaul, run};
use ringhaul_kit::nbd_server::{NbdServer, free_port};
use ringhaul_kit::page::{Page, Shell, replaced};
use ringhaul_kit::system::is_installed;

use super::nbd::{DISK_BYTES, drive, test_folders};

/// Makes certificates of an authority, a server and a client.
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
        let names = "subjectAltName=DNS:storage.test,DNS:localhost\n";
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
    let folders = test_folders()?;
    let (pki, other) = (folders.path("pki"), folders.path("other"));
    certificates(&pki)?;
    certificates(&other)?;
    let folder = format!("--tls-certificates={}", pki.display());
    let server = NbdServer::start_nbdkit(
        &folders,
        &["--tls=require", "--tls-verify-peer", &folder, "memory", "64M"],
    )?;
    let socket = folders.socket("nbd");
    let uri = |pki: &Path, host: &str| {
        let (socket, pki) = (socket.display(), pki.display());
        format!("nbds+unix:///?socket={socket}&tls-certificates={pki}&tls-hostname={host}")
    };
    drive(&folders, &uri(&pki, "storage.test"), "--number_ios 3000")?;
    let alone = folders.path("alone");
    std::fs::create_dir(&alone)?;
    std::fs::copy(pki.join("ca-cert.pem"), alone.join("ca-cert.pem"))?;
    for (disk, words) in [
        (server.uri(""), "it requires TLS; use nbds://"),
        (uri(&other, "storage.test"), "into ca-cert.pem in the folder of tls-certificates"),
        (uri(&pki, "elsewhere.test"), "set tls-hostname to a name in the certificate"),
        (uri(&alone, "storage.test"), "client-cert.pem and client-key.pem in the folder"),
        (uri(Path::new("/nowhere"), "storage.test"), "cannot open /nowhere/ca-cert.pem"),
    ] {
        refused(&disk, words)?;
    }
    Ok(())
}

/// The guide's commands make certificates that server and client accept, and each of their options
/// is needed.
#[test]
fn the_certificates_of_the_guide_are_accepted() -> Result<()> {
    if !is_installed("nbdkit") || !is_installed("openssl") {
        return Ok(());
    }
    let make = Page::read("guide/disks-network.md")?.block("sh", "openssl x509")?;
    let of_version_1 = replaced(&make, &[(" -copy_extensions copy", "")])?;
    for (make, host, refusal) in [
        (&make, "storage", None),
        (&make, "elsewhere.test", Some("set tls-hostname to a name in the certificate")),
        (&of_version_1, "storage", Some("certificate of its own with a subjectAltName")),
    ] {
        let folders = test_folders()?;
        let [server_folder, own] = ["server", "own"].map(|name| folders.path(name));
        std::fs::create_dir(&server_folder)?;
        std::fs::create_dir(&own)?;
        Shell::new(&server_folder)?.run(&format!("set -e; {make}"))?;
        std::fs::copy(server_folder.join("ca-cert.pem"), own.join("ca-cert.pem"))?;
        let folder = format!("--tls-certificates={}", server_folder.display());
        let options = ["--tls=require", &folder, "memory", "64M"];
        let _server = NbdServer::start_nbdkit(&folders, &options)?;
        let (socket, own) = (folders.socket("nbd").display().to_string(), own.display());
        let uri =
            format!("nbds+unix:///?socket={socket}&tls-certificates={own}&tls-hostname={host}");
        match refusal {
            None => drop(run(ringhaul()?.args(["disk", "info", &uri]))?.expect_code(0)?),
            Some(words) => refused(&uri, words)?,
        }
    }
    Ok(())
}

/// Without `tls-hostname`, the certificate must have the name of the host.
#[test]
fn hosts_are_known_by_their_certificates() -> Result<()> {
    if !["nbdkit", "qemu-nbd", "openssl"].iter().all(|program| is_installed(program)) {
        return Ok(());
    }
    let folders = test_folders()?;
    let (pki, disk) = (folders.path("pki"), folders.disk("disk.img", DISK_BYTES)?);
    certificates(&pki)?;
    let (folder, ports) = (pki.display(), [free_port()?, free_port()?]);
    let mut nbdkit = Command::new("nbdkit");
    nbdkit.args(["--foreground", "--ipaddr", "127.0.0.1", "--port", &ports[0].to_string()]);
    nbdkit.args(["--tls=require", "--tls-verify-peer"]);
    nbdkit.arg(format!("--tls-certificates={folder}")).args(["memory", "64M"]);
    let mut qemu = Command::new("qemu-nbd");
    qemu.args(["--persistent", "--shared", "8", "--format", "raw", "--tls-creds", "tls"]);
    qemu.args(["--bind", "127.0.0.1", "--port", &ports[1].to_string(), "--object"]);
    let credentials = "tls-creds-x509,id=tls,endpoint=server,verify-peer=on";
    qemu.arg(format!("{credentials},dir={folder}")).arg(&disk);
    for (port, command) in ports.into_iter().zip([&mut nbdkit, &mut qemu]) {
        let what = format!("{:?}", command.get_program());
        let _server = NbdServer::start_tcp(port, command)?;
        let uri = |host| format!("nbds://{host}:{port}?tls-certificates={folder}");
        drive(&folders, &uri("localhost"), "--number_ios 2000").context(what.clone())?;
        let more = format!("{},connections=2", uri("localhost"));
        drive(&folders, &more, "--number_ios 1000 --numjobs 2").context(what.clone())?;
        let named = format!("{}&tls-hostname=storage.test", uri("127.0.0.1"));
        run(ringhaul()?.args(["disk", "info", &named]))?.expect_code(0).context(what)?;
        refused(&uri("127.0.0.1"), "cannot agree on TLS with the server")?;
        let authorities_of_the_machine = format!("nbds://localhost:{port}");
        refused(&authorities_of_the_machine, &authorities_of_the_machine)?;
        refused(&format!("nbd://localhost:{port}"), "it requires TLS; use nbds://")?;
    }
    Ok(())
}

/// Shared keys are not supported. A server with nothing else is refused with one clear line.
#[test]
fn a_server_with_shared_keys_alone_is_refused() -> Result<()> {
    if !is_installed("nbdkit") || !is_installed("openssl") {
        return Ok(());
    }
    let folders = test_folders()?;
    let (pki, keys) = (folders.path("pki"), folders.path("keys"));
    certificates(&pki)?;
    std::fs::write(&keys, "vm:000102030405060708090a0b0c0d0e0f\n")?;
    let keys = format!("--tls-psk={}", keys.display());
    let _server = NbdServer::start_nbdkit(&folders, &["--tls=require", &keys, "memory", "64M"])?;
    let (socket, pki) = (folders.socket("nbd"), pki.display());
    let uri = format!("nbds+unix:///?socket={}&tls-certificates={pki}", socket.display());
    let named = format!("{uri}&tls-hostname=localhost");
    refused(&named, "shared keys, which are not supported")?;
    let refused = run(ringhaul()?.args(["disk", "info", &format!("{uri}&tls-psk-file=/keys")]))?;
    ensure!(refused.stderr.contains("tls-psk-file"), "{}", refused.stderr);
    refused.expect_refusal(&[])
}
