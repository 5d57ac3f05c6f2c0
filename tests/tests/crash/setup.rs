//! `xtask/setup.sh` on a machine with systemd: services of the packages that it installs stay off.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use anyhow::{Result, ensure};
use ringhaul_kit::container::Container;
use ringhaul_tools::process::output;
use ringhaul_tools::workspace;

/// A service, in the package and on the machine before.
const UNIT: &str = "[Service]\nExecStart=sleep infinity\n[Install]\nWantedBy=multi-user.target\n";
const CONTROL: &str = "Package: foreign\nVersion: 1\nArchitecture: all\n\
                       Maintainer: Tests <root@localhost>\nDescription: a service\n";
const POSTINST: &str = "#!/bin/sh\nset -e\nsystemctl enable --now foreign.service\n";

/// Makes a package with a service, which the installation enables and starts.
fn make_package(folder: &Path) -> Result<()> {
    let tree = folder.join("tree");
    let script = tree.join("DEBIAN/postinst");
    fs::create_dir_all(tree.join("DEBIAN"))?;
    fs::create_dir_all(tree.join("lib/systemd/system"))?;
    fs::write(tree.join("DEBIAN/control"), CONTROL)?;
    fs::write(&script, POSTINST)?;
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755))?;
    fs::write(tree.join("lib/systemd/system/foreign.service"), UNIT)?;
    let mut build = Command::new("dpkg-deb");
    build.args(["--build", "--root-owner-group"]).arg(&tree).arg(folder.join("foreign.deb"));
    output(&mut build).map(drop)
}

#[test]
fn services_of_installed_packages_stay_off() -> Result<()> {
    let cache = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let folder = tempfile::tempdir_in(cache)?;
    fs::copy(workspace::root().join("xtask/setup.sh"), folder.path().join("setup.sh"))?;
    let Some(container) = Container::boot(cache, &[(folder.path(), "/mnt")])? else {
        return Ok(());
    };
    make_package(folder.path())?;
    container.output(&format!(
        "set -e; printf '{UNIT}' > /etc/systemd/system/own.service; systemctl enable --now own"
    ))?;
    let installed = container.output("sh /mnt/setup.sh --apt /mnt/foreign.deb")?;
    ensure!(
        installed.contains("disabling services that came with these packages: foreign.service")
    );
    let states =
        container.run("systemctl is-enabled own foreign; systemctl is-active own foreign")?;
    ensure!(states.stdout == "enabled\ndisabled\nactive\ninactive\n", "{}", states.stdout);
    // A choice of the administrator survives the next run.
    let again = container.output(
        "set -e; systemctl enable --now foreign
        sh /mnt/setup.sh --apt /mnt/foreign.deb; systemctl is-enabled foreign",
    )?;
    ensure!(again.ends_with("enabled") && !again.contains("disabling"), "{again}");
    Ok(())
}
