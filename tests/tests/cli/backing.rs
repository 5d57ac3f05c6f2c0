//! Backing files of images: allowed ones, loops, and chains that are too long.

use anyhow::{Context, Result, ensure};
use ringhaul_kit::cli::{Finished, TestFolders, ringhaul, run};
use ringhaul_kit::system::{is_installed, run as run_program};

use crate::test_folders;

struct Images(TestFolders);

impl Images {
    /// `None` if qemu-img is not installed.
    fn new() -> Result<Option<Self>> {
        is_installed("qemu-img").then(|| test_folders().map(Self)).transpose()
    }

    fn path(&self, name: &str) -> Result<String> {
        let path = self.0.path(name).into_os_string().into_string();
        path.ok().context("a path with an odd name")
    }

    /// Makes an image over a backing file that may be missing.
    fn make_over(&self, below: &str, format: &str, name: &str) -> Result<()> {
        let (below, path) = (["-u", "-b", below, "-F", format], self.path(name)?);
        let words = [&["create", "-q", "-f", "qcow2"], &below[..], &[&path, "1M"]].concat();
        run_program("qemu-img", &words).map(drop)
    }

    fn info(&self, backing: &str, name: &str) -> Result<Finished> {
        let disk = format!("qcow2,backing={backing},path={}", self.path(name)?);
        run(ringhaul()?.args(["disk", "info", &disk]))
    }
}

#[test]
fn a_backing_file_is_opened_if_the_name_of_the_disk_allows_it() -> Result<()> {
    let Some(images) = Images::new()? else { return Ok(()) };
    for disk in ["base.img", "other.img"] {
        images.0.disk(disk, 1 << 20)?;
    }
    images.make_over("base.img", "raw", "middle")?;
    images.make_over("middle", "qcow2", "top")?;
    let absolute = images.path("base.img")?;
    let plain = format!("qcow2:{}", images.path("top")?);
    let refused = run(ringhaul()?.args(["disk", "info", &plain]))?.expect_code(2)?.stderr;
    for words in ["allows no backing file", "name of the disk: backing=middle.", "backing=beside"] {
        ensure!(refused.contains(words), "{refused}");
    }
    for (backing, expected) in [
        ("none", "allows no backing file"),
        ("middle", "add it: backing=middle:base.img"),
        ("base.img", "add it: backing=base.img:middle"),
        ("middle:other.img", "add it: backing=middle:other.img:base.img"),
        ("middle:../base.img", "add it: backing=middle:../base.img:base.img"),
    ] {
        let refused = images.info(backing, "top")?.expect_code(2)?.stderr;
        ensure!(refused.contains(expected), "{backing}: {refused}");
    }
    for backing in ["middle:base.img", "beside", "anywhere", &format!("{absolute}:middle")] {
        images.info(backing, "top")?.expect_code(0)?;
    }
    Ok(())
}

#[test]
fn images_that_are_their_own_backing_files_are_called_a_loop() -> Result<()> {
    let Some(images) = Images::new()? else { return Ok(()) };
    for (image, below) in [("alone", "alone"), ("first", "second"), ("second", "first")] {
        images.make_over(below, "qcow2", image)?;
    }
    for (image, again) in [("alone", "/alone; correct"), ("first", "/first; correct")] {
        let disk = format!("qcow2,backing=beside,path={}", images.path(image)?);
        let mut serve = ringhaul()?;
        serve.arg("serve").arg("--socket-path").arg(images.0.socket("vm.sock"));
        for (door, refused) in [
            ("serve", run(serve.args(["--disk", &disk]))?),
            ("info", images.info("beside", image)?),
        ] {
            let refused = refused.expect_code(2)?.stderr;
            let says_so = refused.contains("form a loop through") && refused.contains(again);
            ensure!(says_so && !refused.contains("locked"), "{door}: {refused}");
        }
    }
    Ok(())
}

/// The error names the image that the user passed, not one of its backing files.
#[test]
fn a_chain_that_is_too_long_is_named_by_its_image() -> Result<()> {
    let Some(images) = Images::new()? else { return Ok(()) };
    let bottom = images.path("layer0")?;
    run_program("qemu-img", &["create", "-q", "-f", "qcow2", &bottom, "1M"])?;
    for layer in 1..33 {
        images.make_over(&format!("layer{}", layer - 1), "qcow2", &format!("layer{layer}"))?;
    }
    images.info("beside", "layer31")?.expect_code(0)?;
    let refused = images.info("beside", "layer32")?.expect_code(2)?.stderr;
    let expected = "/layer32 has more than 32 layers";
    ensure!(refused.contains(expected) && refused.contains("qemu-img commit"), "{refused}");
    Ok(())
}
