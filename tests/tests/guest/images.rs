//! A disk in an image.

use std::path::Path;

use anyhow::{Context, Result};
use ringhaul_kit::server::{Cache, Engine, Export};
use ringhaul_kit::system::{is_installed, run};

use super::{
    DISK_BYTES, FILES_CHECK, FILES_WRITE, FIO_VERIFY, LIMIT, Scene, WRITE_ZEROES, boot_fast,
    check_clean_exit, check_file_system, check_same_bytes, scenario, with,
};

fn qemu_img(words: &[&str]) -> Result<()> {
    run("qemu-img", words).map(drop)
}

fn text(path: &Path) -> Result<&str> {
    path.to_str().context("a path with an odd name")
}

#[test]
fn data_in_a_qcow2_image() -> Result<()> {
    if !is_installed("qemu-img") {
        return Ok(());
    }
    scenario(data)
}

fn data() -> Result<()> {
    let scene = Scene::new()?;
    let export = scene.export("image", Engine::IoUring, Cache::None)?;
    let disk = Some(format!("qcow2:{}", export.file.display()));
    let export = Export { disk, ..export };
    let raw = export.file.with_extension("raw");
    let (image, raw) = (text(&export.file)?, text(&raw)?);
    qemu_img(&["create", "-q", "-f", "qcow2", image, &DISK_BYTES.to_string()])?;
    let mut server = scene.serve(&export)?;
    let mut vm = boot_fast(&[&export])?;

    let disk = ("DISK", "vda");
    vm.check(&with(FIO_VERIFY, &[disk, ("MIN_BYTES", "512")]), LIMIT)?;
    vm.check("/usr/sbin/blkdiscard /dev/vda", LIMIT)?;
    vm.check(&with(WRITE_ZEROES, &[disk]), LIMIT)?;
    vm.check(&with(FILES_WRITE, &[disk]), LIMIT)?;
    vm.check(&with(FILES_CHECK, &[disk]), LIMIT)?;
    vm.check("e2fsck -f -n /dev/vda", LIMIT)?;
    qemu_img(&["convert", "-U", "-f", "qcow2", "-O", "raw", image, raw])?;
    check_same_bytes(&mut vm, "vda", Path::new(raw))?;

    vm.power_off(LIMIT)?;
    server.check_running()?;
    check_clean_exit(&mut server)?;
    qemu_img(&["check", "-q", image])?;
    qemu_img(&["convert", "-f", "qcow2", "-O", "raw", image, raw])?;
    check_file_system(Path::new(raw))
}
