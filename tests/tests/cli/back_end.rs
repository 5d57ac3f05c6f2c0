//! Interfaces for management programs: the back-end program conventions of vhost-user, and the
//! discovery files in `contrib`.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use ringhaul_kit::cli::{Finished, Running, bench, ringhaul, run};
use ringhaul_kit::server::ringhaul_binary;
use rustix::process::Signal;
use serde_json::Value;
use tempfile::TempDir;

use crate::{DISK_BYTES, test_folders};

/// The discovery files, to be installed in /usr/share/qemu/vhost-user, and the features of the
/// programs that they name.
const DISCOVERY: [(&str, &[&str]); 2] = [
    (include_str!("../../../contrib/50-ringhaul.json"), &["read-only", "blk-file"]),
    (include_str!("../../../contrib/50-ringhaul-scsi.json"), &["read-only", "lun"]),
];

/// The folder of files that are installed beside the program.
const CONTRIB: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../contrib");

/// A folder that stands for /usr/bin.
struct Installed(TempDir);

impl Installed {
    fn new() -> Result<Self> {
        let folder = tempfile::tempdir().context("making a folder for programs")?;
        symlink(ringhaul_binary()?.canonicalize()?, folder.path().join("ringhaul"))?;
        let script = Path::new(CONTRIB).join("ringhaul-scsi").canonicalize()?;
        symlink(script, folder.path().join("ringhaul-scsi"))?;
        Ok(Self(folder))
    }

    /// The installed path of the program that a discovery file names.
    fn path(&self, binary: &Path) -> Result<PathBuf> {
        ensure!(binary.starts_with("/usr/bin"), "{} is not in /usr/bin", binary.display());
        Ok(self.0.path().join(binary.file_name().context("the binary has no name")?))
    }

    /// A command that starts the program; the program does not outlive the test.
    fn command(&self, name: &str) -> Result<Command> {
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL"]).arg(self.path(&Path::new("/usr/bin").join(name))?);
        Ok(command)
    }
}

/// Management programs start a back-end without a subcommand.
#[test]
fn options_without_a_subcommand_start_a_blk_back_end() -> Result<()> {
    let folders = test_folders()?;
    let file = folders.disk("disk.img", DISK_BYTES)?;
    let socket = folders.socket("disk.sock");
    let (socket_name, file_name) = (socket.display(), file.display());
    let spaced = [format!("--socket-path={socket_name}"), format!("--blk-file={file_name}")];
    let swapped = [format!("--blk-file={file_name}"), format!("--socket-path={socket_name}")];
    let flag_first = ["--read-only".to_owned(), spaced[0].clone(), spaced[1].clone()];
    for arguments in [&spaced[..], &swapped[..], &flag_first[..]] {
        let mut daemon = Running::serve(ringhaul()?.args(arguments))?;
        run(&mut bench(&socket, "--rw randread --number_ios 50")?)?.expect_code(0)?;
        daemon.signal(Signal::TERM)?;
        daemon.finish()?.expect_code(0)?;
    }
    Ok(())
}

#[test]
fn options_without_a_subcommand_start_a_scsi_back_end() -> Result<()> {
    let folders = test_folders()?;
    let installed = Installed::new()?;
    let socket = folders.socket("scsi.sock");
    let socket_path = format!("--socket-path={}", socket.display());
    let lun = format!("--lun=3,blk-file={}", folders.disk("disk.img", DISK_BYTES)?.display());
    let mut daemon = Running::serve(installed.command("ringhaul-scsi")?.args([socket_path, lun]))?;
    let options = "--device scsi --lun 3 --rw randread --number_ios 50";
    run(&mut bench(&socket, options)?)?.expect_code(0)?;
    daemon.signal(Signal::TERM)?;
    daemon.finish()?.expect_code(0)?;
    Ok(())
}

fn capabilities(command: &mut Command) -> Result<Value> {
    let finished = run(command)?.expect_code(0)?;
    let Finished { stdout, stderr, .. } = &finished;
    ensure!(stderr.is_empty(), "on stderr:\n{stderr}");
    serde_json::from_str(stdout).with_context(|| format!("no JSON:\n{stdout}"))
}

/// "Other options and arguments should be ignored." Only the kind of device decides the output.
#[test]
fn capabilities_are_printed_in_spite_of_other_options() -> Result<()> {
    for (kind, arguments) in [
        ("block", &["--print-capabilities"][..]),
        ("block", &["serve", "--print-capabilities"]),
        ("block", &["--socket-path", "/nonexistent/socket", "--print-capabilities"]),
        ("block", &["--print-capabilities", "--blk-file", "/nonexistent", "--disk", "null"]),
        ("block", &["--print-capabilities", "--unknown-option"]),
        ("block", &["--print-capabilities", "--device", "tape"]),
        ("block", &["--fd=3", "--print-capabilities", "argument"]),
        ("scsi", &["--device", "scsi", "--print-capabilities"]),
        ("scsi", &["serve", "--print-capabilities", "--lun", "x", "--device=scsi", "--fd=3"]),
    ] {
        let printed = capabilities(ringhaul()?.args(arguments));
        let printed = printed.with_context(|| format!("{arguments:?}"))?;
        ensure!(printed["type"] == kind, "{arguments:?}: {printed}");
    }
    Ok(())
}

/// The schema is docs/interop/vhost-user.json of the QEMU project: `VhostUserBackend` for the file,
/// `VHostUserBackendCapabilities` for the program's output.
#[test]
fn the_discovery_files_fit_the_schema_and_the_program() -> Result<()> {
    let installed = Installed::new()?;
    let help = run(ringhaul()?.args(["serve", "--help"]))?.expect_code(0)?;
    for (text, features) in DISCOVERY {
        let file: Value = serde_json::from_str(text).context("the discovery file is no JSON")?;
        let object = file.as_object().context("the discovery file is no object")?;
        let known = ["description", "type", "binary", "tags"];
        let unknown: Vec<&String> = object.keys().filter(|key| !known.contains(&&***key)).collect();
        ensure!(unknown.is_empty(), "the schema has no {unknown:?}");
        for key in ["description", "type", "binary"] {
            let text = file[key].as_str().with_context(|| format!("{key} is no string"))?;
            ensure!(!text.is_empty(), "{key} is empty");
        }
        let tags = file["tags"].as_array().context("the tags are not a list")?;
        ensure!(tags.iter().all(Value::is_string), "not all tags are strings");

        let binary = installed.path(Path::new(file["binary"].as_str().unwrap_or_default()))?;
        let printed = capabilities(Command::new(&binary).arg("--print-capabilities"))?;
        ensure!(printed["type"] == file["type"], "{} and {}", printed["type"], file["type"]);
        // The schema has no other features of block devices.
        ensure!(printed["features"] == serde_json::json!(features), "{printed}");
        for feature in features {
            ensure!(help.stdout.contains(&format!("--{feature}")), "there is no --{feature}");
        }
    }
    Ok(())
}
