//! A guest's names for the units of a virtio-scsi device, and the properties that it sees.

use std::collections::HashSet;

use anyhow::{Context, Result, ensure};
use ringhaul_kit::server::{Cache, Engine, Export};

use super::{LIMIT, Scene, boot, check_clean_exit, scenario};

const NAMES: &str = include_str!("../../guest/scsi-names.sh");

/// The block size of the usual file systems (ext4, XFS), in which space is freed.
const GRANULARITY: &str = "DISC-GRAN=\"4K\"";

#[test]
fn units_have_names_that_stay() -> Result<()> {
    scenario(names)
}

fn names() -> Result<()> {
    let scene = Scene::new()?;
    let file = |name: &str| -> Result<String> {
        Ok(scene.export(name, Engine::Aio, Cache::None)?.file.display().to_string())
    };
    let units = vec![
        format!("1,blk-file={},rotational=on,discard=off", file("thick")?),
        format!("1:300,blk-file={},logical-block-size=4096,rotational=off", file("large")?),
        "7,null=64M,vendor=ACME,product=Fast Disk,revision=7.1,serial=S-1,wwn=5000c5000000abcd,\
         read-only=on"
            .to_owned(),
        "8,null=64M,like=qemu,serial=data0".to_owned(),
        "9,null=64M,vendor=DO,product=Volume,names=serial,serial=volume-1".to_owned(),
        "10,null=64M,like=qemu,serial=data1,wwn=5000c5000000abce".to_owned(),
    ];
    let export = scene.export("names", Engine::Aio, Cache::None)?;
    let export = Export { units: Some(units), ..export };
    let mut server = scene.serve(&export)?;
    let mut vm = boot(&[&export])?;
    let seen = vm.check(NAMES, LIMIT)?;
    let has = |address: &str, words: &str| -> Result<()> {
        let mut lines =
            seen.lines().filter_map(|line| line.strip_prefix(address)?.strip_prefix(' '));
        ensure!(lines.any(|line| line.contains(words)), "{address} lacks {words}:\n{seen}");
        Ok(())
    };
    has("0:0", "scsi-SRinghaul_Virtual_Disk_names")?;
    for words in ["SERIAL=\"names\"", "ROTA=\"0\" LOG-SEC=\"512\"", GRANULARITY, "RO=\"0\""] {
        has("0:0", words)?;
    }
    for words in ["ROTA=\"1\" LOG-SEC=\"512\"", "DISC-GRAN=\"0B\""] {
        has("0:1", words)?;
    }
    // Linux shows the address of LUN 300 as 16384 more.
    for words in ["ROTA=\"0\" LOG-SEC=\"4096\" PHY-SEC=\"4096\"", GRANULARITY] {
        has("1:16684", words)?;
    }
    for name in ["wwn-0x5000c5000000abcd", "scsi-35000c5000000abcd", "scsi-SACME_Fast_Disk_S-1"] {
        has("0:7", name)?;
    }
    has("0:7", "VENDOR=\"ACME\" MODEL=\"Fast Disk\" REV=\"7.1\" SERIAL=\"S-1\"")?;
    has("0:7", "ROTA=\"0\" LOG-SEC=\"512\" PHY-SEC=\"512\" DISC-GRAN=\"512B\" RO=\"1\"")?;
    // Names in the style of QEMU's own disks, without a WWN and with one, and in the style of cloud
    // providers.
    for (address, names) in [
        ("0:8", ["scsi-0QEMU_QEMU_HARDDISK_data0", "scsi-SQEMU_QEMU_HARDDISK_data0"]),
        ("0:9", ["scsi-0DO_Volume_volume-1", "scsi-SDO_Volume_volume-1"]),
        ("0:10", ["scsi-35000c5000000abce", "scsi-SQEMU_QEMU_HARDDISK_data1"]),
    ] {
        has(address, names[0])?;
        has(address, names[1])?;
    }
    has("0:8", "VENDOR=\"QEMU\" MODEL=\"QEMU HARDDISK\" REV=\"2.5+\" SERIAL=\"data0\"")?;
    // A WWN that is derived from a disk is unique.
    let wwns = seen.lines().filter_map(|line| line.split(" wwn-").nth(1));
    let wwns: HashSet<&str> = wwns.filter(|wwn| !wwn.is_empty()).collect();
    ensure!(wwns.len() == 5, "some disks share a WWN:\n{seen}");
    for address in ["0:0", "0:1", "1:16684"] {
        has(address, "wwn-0x3")?;
    }

    check_clean_exit(&mut server)?;
    let mut server = scene.serve(&export)?;
    let again = vm.check(NAMES, LIMIT).context("after a restart of the daemon")?;
    ensure!(again == seen, "names have changed with a restart:\n{seen}\nand then\n{again}");
    vm.power_off(LIMIT)?;
    check_clean_exit(&mut server)
}
