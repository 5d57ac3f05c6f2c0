//! Images that are served without their format, by mistake or because a guest wrote their header.

use std::fs;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use ringhaul_kit::cli::{Running, TestFolders, ringhaul, run, serve};
use ringhaul_kit::system::{is_installed, run as run_program};

use crate::{DISK_BYTES, test_folders};

/// The first 8 bytes of a header of version 3, which are enough for the warning.
const QCOW2: &[u8] = b"QFI\xfb\0\0\0\x03";
const WARNING: &str = "it has the header of a qcow2 image but is used as a raw disk";

fn image(folders: &TestFolders, name: &str, header: &[u8]) -> Result<String> {
    let path = folders.disk(name, DISK_BYTES)?;
    fs::File::options().write(true).open(&path)?.write_all_at(header, 0)?;
    path.into_os_string().into_string().ok().context("a path with an odd name")
}

fn ctl(folders: &TestFolders, words: &[&str]) -> Result<Command> {
    let mut command = ringhaul()?;
    command.arg("ctl").arg("--control").arg(folders.socket("control")).args(words);
    Ok(command)
}

fn count(text: &str) -> usize {
    text.matches(WARNING).count()
}

#[test]
fn every_command_warns_of_an_image_without_its_format() -> Result<()> {
    let folders = test_folders()?;
    let path = image(&folders, "image", QCOW2)?;
    let plain = image(&folders, "plain", &[1; 64])?;
    let info = run(ringhaul()?.args(["disk", "info", &path]))?.expect_code(0)?.stdout;
    ensure!(count(&info) == 1 && info.contains("\nwarning   "), "{info}");
    let json = run(ringhaul()?.args(["disk", "info", "--json", &path]))?.expect_code(0)?.stdout;
    ensure!(json.contains("\"warning\": \"it has the header"), "{json}");
    let config = folders.path("config.toml");
    let export = |name: &str, disk: &str| {
        let socket = folders.socket(name).display().to_string();
        let device = format!("device.blk.file = \"{disk}\"");
        format!("[[export]]\nendpoint.path = \"{socket}\"\n{device}\n")
    };
    fs::write(&config, [export("a", &path), export("b", &plain)].concat())?;
    let checked = run(ringhaul()?.arg("check").arg(&config))?.expect_code(0)?.stdout;
    ensure!(count(&checked) == 1 && checked.contains(": warning: "), "{checked}");

    let mut command = serve(&folders.socket("first"), Path::new(&path))?;
    let daemon = Running::serve(command.arg("--control").arg(folders.socket("control")))?;
    let log = daemon.stderr();
    ensure!(count(log) == 1 && log.contains(" WARN "), "{log}");
    ensure!(log.contains("name it qcow2:PATH") && log.contains("raw,over=PATH"), "{log}");
    let other = image(&folders, "other", QCOW2)?;
    let socket = folders.socket("second").display().to_string();
    let added = ["add", "--socket-path", &socket, "--device", "scsi", "--lun"];
    let unit = format!("0,disk={other}");
    let added = run(ctl(&folders, &[&added[..], &[&unit]].concat())?.arg("--name=two"))?;
    let added = added.expect_code(0)?.stderr;
    ensure!(count(&added) == 1 && added.starts_with("ringhaul: two: warning: "), "{added}");
    let unit = format!("1,disk={plain}");
    let silent = run(&mut ctl(&folders, &["add-lun", "two", &unit])?)?.expect_code(0)?;
    ensure!(silent.stderr.is_empty(), "a warning about another unit: {}", silent.stderr);
    let unit = format!("2,disk={}", image(&folders, "third", QCOW2)?);
    let error = run(&mut ctl(&folders, &["add-lun", "two", &unit])?)?.expect_code(0)?.stderr;
    ensure!(count(&error) == 1, "{error}");
    let shown = run(ctl(&folders, &["--json", "show", "two"])?.arg("--"))?.expect_code(0)?.stdout;
    ensure!(count(&shown) == 2, "{shown}");
    Ok(())
}

/// Images of each format that QEMU makes.
#[test]
fn images_of_all_formats_have_a_warning_with_their_format() -> Result<()> {
    if !is_installed("qemu-img") {
        return Ok(());
    }
    let folders = test_folders()?;
    for (make, format) in [
        ("qcow2", "qcow2"),
        ("qcow2 -o compat=0.10", "qcow2"),
        ("qcow", "qcow"),
        ("qed", "QED"),
        ("vmdk", "VMDK"),
        ("vmdk -o subformat=streamOptimized", "VMDK"),
        ("vmdk -o subformat=monolithicFlat", "VMDK"),
        ("vdi", "VDI"),
        ("vhdx", "VHDX"),
        ("vpc", "VHD"),
        ("vpc -o subformat=fixed", "VHD"),
        ("parallels", "Parallels"),
    ] {
        let path = folders.path(&make.replace(' ', "-")).display().to_string();
        let words = [&["create", "-q", "-f"], &make.split(' ').collect::<Vec<_>>()[..]].concat();
        run_program("qemu-img", &[&words[..], &[&path, "16M"]].concat())?;
        // Files of any length.
        let file = fs::File::options().write(true).open(&path)?;
        let (bytes, is_fixed) = (file.metadata()?.len(), make.contains("fixed"));
        if !is_fixed {
            file.set_len(bytes.next_multiple_of(512))?;
        }
        let info = run(ringhaul()?.args(["disk", "info", &path]))?.expect_code(0)?.stdout;
        let warning = format!("\nwarning   it has the header of a {format} image");
        ensure!(info.contains(&warning), "{make}: {info}");
    }
    Ok(())
}

/// A guest may store an image in its disk, even at the beginning.
#[test]
fn a_disk_with_the_format_raw_may_begin_like_an_image() -> Result<()> {
    let folders = test_folders()?;
    let path = image(&folders, "image", QCOW2)?;
    let info = run(ringhaul()?.args(["disk", "info", &format!("raw,over={path}")]))?;
    let info = info.expect_code(0)?.stdout;
    ensure!(info.contains("format    raw") && count(&info) == 0, "{info}");
    Ok(())
}

/// Such advice would destroy the image.
#[test]
fn no_advice_serves_an_image_without_its_format() -> Result<()> {
    let folders = test_folders()?;
    let odd = image(&folders, "odd", QCOW2)?;
    fs::File::options().write(true).open(&odd)?.set_len(196_616)?;
    let vmdk = image(&folders, "vmdk", b"KDMV")?;
    for (disk, expected) in [
        (odd, "196616 bytes is not a multiple of the logical block, and it has the header"),
        (format!("qcow2:{vmdk}"), "header of a VMDK image; convert it with `qemu-img convert"),
        (format!("image,format=auto,path={vmdk}"), "has the header of a VMDK image, which is not"),
    ] {
        let refused = run(ringhaul()?.args(["disk", "info", &disk]))?.expect_code(2)?.stderr;
        ensure!(refused.contains(expected), "{refused}");
        for advice in ["truncate", "give its path", "raw,over"] {
            ensure!(!refused.contains(advice), "it leads to {advice}: {refused}");
        }
    }
    Ok(())
}
