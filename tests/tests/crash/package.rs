//! The packages of `make package`: the one of Debian in a system of its own, the one of RPM, and an
//! image in a container.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use ringhaul_kit::cli::{Finished, bench, run};
use ringhaul_kit::container::Container;
use ringhaul_kit::daemon::LIMIT;
use ringhaul_kit::server::ringhaul_binary;
use ringhaul_kit::system::{can_change_system, is_installed, print_skipped};
use ringhaul_tools::process::{output, retry, wait_child};
use ringhaul_tools::workspace;
use tempfile::TempDir;

use crate::driver::{BLOCK_BYTES, Driver, FEW_BLOCKS, check_file};

/// The time for one run of the script on a busy machine.
const BUILD_MAX: Duration = Duration::from_secs(900);

/// The services of the test, and a folder of each one's state.
const SERVICES: [(&str, &str); 2] =
    [("ringhaul@vm1", "/var/lib/ringhaul-vm1"), ("ringhaul", "/var/lib/ringhaul")];

/// Returns true if all programs are here. Otherwise prints a message, on a system for which there
/// is no script that installs them.
pub(super) fn has_tools(tools: &[&str]) -> Result<bool> {
    let missing: Vec<&str> = tools.iter().copied().filter(|tool| !is_installed(tool)).collect();
    if missing.is_empty() {
        return Ok(true);
    }
    let missing = missing.join(", ");
    ensure!(!is_installed("apt-get"), "{missing} missing: make setup");
    print_skipped(&format!("{missing} missing; install them"));
    Ok(false)
}

/// Makes a package of the tested program in `folder`.
pub(super) fn make(kind: &str, folder: &Path, variables: &[(&str, &str)]) -> Result<()> {
    let mut command = Command::new("sh");
    command.arg("contrib/package.sh").arg(kind).current_dir(workspace::root());
    command.env("FAST", "yes").env("OUT", folder).env("BINARY", ringhaul_binary()?.canonicalize()?);
    command.envs(variables.iter().copied());
    let messages = tempfile::NamedTempFile::new()?;
    command.stdout(messages.reopen()?).stderr(messages.reopen()?);
    let mut child = command.spawn().context("starting contrib/package.sh")?;
    let status = wait_child(&mut child, Instant::now() + BUILD_MAX)?;
    ensure!(status.success(), "{status}: {}", fs::read_to_string(messages.path())?);
    Ok(())
}

/// The only file in a folder whose name has this end.
pub(super) fn file_of(folder: &Path, end: &str) -> Result<PathBuf> {
    let paths = fs::read_dir(folder)?.map(|entry| Ok(entry?.path()));
    let paths: Vec<PathBuf> = paths.collect::<Result<_>>()?;
    let mut found = paths.iter().filter(|path| path.to_string_lossy().ends_with(end));
    let file = found.next().with_context(|| format!("no *{end} among {paths:?}"))?;
    ensure!(found.next().is_none(), "several *{end} among {paths:?}");
    Ok(file.clone())
}

/// A container with two packages of Debian at `/mnt/packages`, of which the second one is newer.
struct Host {
    container: Container,
    disks: TempDir,
    _packages: [TempDir; 2],
}

impl Host {
    fn boot() -> Result<Option<Self>> {
        if !can_change_system("packages of a container")
            || !has_tools(&["cargo-cyclonedx", "cargo-deb", "dpkg-shlibdeps", "lintian"])?
        {
            return Ok(None);
        }
        let cache = Path::new(env!("CARGO_TARGET_TMPDIR"));
        let [disks, old, new] = [(); 3].map(|()| tempfile::tempdir_in(cache));
        let (disks, packages) = (disks?, [old?, new?]);
        for (folder, revision) in packages.iter().zip(["1", "2"]) {
            make("deb", folder.path(), &[("REVISION", revision)])?;
        }
        let checked = file_of(packages[1].path(), ".deb")?;
        let mut lintian = Command::new("lintian");
        // It leaves a file among the temporary ones.
        lintian.env("TMPDIR", packages[1].path());
        output(lintian.args(["--allow-root", "--fail-on", "error"]).arg(checked))?;
        let binds = [
            (disks.path(), "/srv/disks"),
            (packages[0].path(), "/mnt/old"),
            (packages[1].path(), "/mnt/new"),
        ];
        let container = Container::boot(cache, &binds)?;
        Ok(container.map(|container| Self { container, disks, _packages: packages }))
    }

    fn run(&self, script: &str) -> Result<String> {
        self.container.output(&format!("set -e; {script}"))
    }

    fn property(&self, unit: &str, property: &str) -> Result<String> {
        self.run(&format!("systemctl show --value --property={property} {unit}"))
    }
}

#[test]
fn a_package_of_debian_is_installed_upgraded_and_purged_under_load() -> Result<()> {
    let Some(host) = Host::boot()? else { return Ok(()) };
    // Half-configured packages fail, and so do scripts that read a terminal.
    host.run("dpkg --install /mnt/old/*.deb < /dev/null")?;
    ensure!(host.run("stat -c %U:%G:%a /etc/ringhaul")? == "root:ringhaul:750");
    let states =
        host.container.run("systemctl is-active ringhaul; systemctl is-enabled ringhaul")?;
    ensure!(states.stdout == "inactive\ndisabled\n", "it runs unasked: {}", states.stdout);
    host.run(
        "truncate -s 512K /srv/disks/vm1.img; chown ringhaul:ringhaul /srv/disks/vm1.img
        echo '# a line of the administrator' >> /etc/ringhaul.toml
        systemctl enable --now ringhaul@vm1 ringhaul
        ringhaul ctl --control /run/ringhaul/control add --name vm2 --disk null:1M \\
            --socket-path /run/ringhaul/vm2.sock",
    )?;
    let socket = host.container.path("/run/ringhaul-vm1/disk.sock");
    let mut driver = Driver::new(&socket, FEW_BLOCKS, true)?;
    driver.attach()?;
    upgrade(&host, &mut driver)?;
    driver.run(0, true)?;
    let Driver { frontend, versions, .. } = driver;
    drop(frontend);
    leave(&host)?;
    check_file(&host.disks.path().join("vm1.img"), &versions)
}

/// Installs the new package while the driver works.
fn upgrade(host: &Host, driver: &mut Driver) -> Result<()> {
    let processes = SERVICES.map(|(unit, _)| host.property(unit, "MainPID"));
    let mut requests = 0;
    let upgraded = std::thread::scope(|scope| -> Result<Finished> {
        let install =
            scope.spawn(|| host.container.run("dpkg --install /mnt/new/*.deb < /dev/null"));
        while !install.is_finished() {
            driver.run(50, false)?;
            requests += 50;
        }
        install.join().ok().context("the installation panicked")?
    })?;
    let upgraded = upgraded.expect_code(0)?;
    driver.run(200, false)?;
    eprintln!("{requests} requests during the upgrade");
    for ((unit, _), before) in SERVICES.into_iter().zip(processes) {
        let said = format!("ringhaul: {unit}.service runs the new program");
        ensure!(upgraded.stdout.contains(&said), "{}{}", upgraded.stdout, upgraded.stderr);
        let process = host.property(unit, "MainPID")?;
        ensure!(process != "0" && process != before?, "{unit} has the process {process}");
        let program = host.run(&format!("readlink /proc/{process}/exe"))?;
        ensure!(program == "/usr/bin/ringhaul", "{unit} runs {program}");
        ensure!(host.property(unit, "NRestarts")? == "0", "{unit} was restarted");
    }
    a_service_out_of_reach_is_named(host)?;
    an_error_of_the_configuration_keeps_the_filters_of_the_unit(host)?;
    ensure!(host.property("ringhaul@vm1", "StatusText")? == "1 export served, 1 with a front-end");
    ensure!(host.run("dpkg-query -W -f '${Version}' ringhaul")?.ends_with("-2"));
    host.run("grep -q 'a line of the administrator' /etc/ringhaul.toml").map(drop)
}

/// Upgrades the services once more, while the control socket of one of them is elsewhere.
fn a_service_out_of_reach_is_named(host: &Host) -> Result<()> {
    let process = host.property("ringhaul", "MainPID")?;
    let repeated = host.container.run(
        "cp -p /usr/bin/ringhaul /usr/bin/ringhaul.new; mv /usr/bin/ringhaul.new /usr/bin/ringhaul
        cd /run/ringhaul; mv control elsewhere; /usr/lib/ringhaul/upgrade-services
        status=$?; mv elsewhere control; exit $status",
    )?;
    let repeated = repeated.expect_code(1)?;
    ensure!(repeated.stdout == "ringhaul: ringhaul@vm1.service runs the new program\n");
    let kept = "ringhaul: ringhaul.service keeps its former program; later try: ringhaul ctl \
                --control /run/ringhaul/control upgrade /usr/bin/ringhaul\n";
    ensure!(repeated.stderr.ends_with(kept), "{}", repeated.stderr);
    ensure!(host.property("ringhaul", "MainPID")? == process, "it has another process");
    Ok(())
}

/// The reload of a unit fails after its takeover. A second takeover outside the unit would lose the
/// filters.
fn an_error_of_the_configuration_keeps_the_filters_of_the_unit(host: &Host) -> Result<()> {
    let filters = || {
        let process = host.property("ringhaul", "MainPID")?;
        let filters = host.run(&format!("grep ^Seccomp_filters: /proc/{process}/status"))?;
        anyhow::Ok((process, filters))
    };
    let (process, before) = filters()?;
    // The path is too long for a socket.
    let (socket, file) = ("x".repeat(120), "/etc/ringhaul.toml");
    let upgraded = host.container.run(&format!(
        "set -e; cp -p {file} {file}.good
        echo '[[export]]' >> {file}
        echo 'endpoint = {{ path = \"/run/ringhaul/{socket}\" }}' >> {file}
        echo 'device = {{ blk = {{ null = {{ size-bytes = 1048576 }} }} }}' >> {file}
        cp -p /usr/bin/ringhaul /usr/bin/ringhaul.new; mv /usr/bin/ringhaul.new /usr/bin/ringhaul
        status=0; /usr/lib/ringhaul/upgrade-services || status=$?
        mv {file}.good {file}; exit $status"
    ))?;
    let upgraded = upgraded.expect_code(0)?;
    ensure!(upgraded.stdout.contains("ringhaul: ringhaul.service runs the new program\n"));
    let (now, after) = filters()?;
    ensure!(now != process && now != "0", "the former program continues in the process {now}");
    ensure!(after == before, "the new process has {after:?} instead of {before:?}");
    Ok(())
}

/// needrestart reads the file as Perl does, and looks for the first pattern of a unit.
#[test]
fn needrestart_leaves_services_alone() -> Result<()> {
    if !has_tools(&["perl"])? {
        return Ok(());
    }
    let file = workspace::root().join("contrib/packages/needrestart.conf");
    let script = "our %nrconf; do $ARGV[0]; die $@ if $@; my $rules = $nrconf{override_rc};
        for my $unit (@ARGV[1..$#ARGV]) {
            my ($rule) = grep { $unit =~ /$_/ } keys %$rules;
            print \"$unit \", defined $rule ? $rules->{$rule} : 'restart', \"\\n\" }";
    let mut decide = Command::new("perl");
    decide.args(["-e", script]).arg(file);
    decide.args(["ringhaul.service", "ringhaul@vm1.service", "ringhaulx.service"]);
    let decided = output(&mut decide)?;
    let expected = "ringhaul.service 0\nringhaul@vm1.service 0\nringhaulx.service restart";
    ensure!(decided.trim() == expected, "{decided}");
    Ok(())
}

/// Removes and purges the package.
fn leave(host: &Host) -> Result<()> {
    host.run("dpkg --remove ringhaul")?;
    for (unit, state) in SERVICES {
        let (state_now, result) =
            (host.property(unit, "ActiveState")?, host.property(unit, "Result")?);
        ensure!(
            state_now == "inactive" && result == "success",
            "{unit} is {state_now} with {result}: {}",
            host.run("journalctl --no-pager --lines=20")?
        );
        host.run(&format!("test -d {state}; test ! -e /usr/bin/ringhaul"))?;
    }
    host.run("test -e /etc/ringhaul.toml")?;
    // A user may keep files beside a state file, and have a folder of a similar name.
    let foreign = ["/var/lib/ringhaul/disk.img", "/var/lib/ringhaul-own/notes"];
    let [disk, notes] = foreign;
    host.run(&format!("mkdir /var/lib/ringhaul-own; touch {disk} {notes}"))?;
    host.run("touch /var/lib/ringhaul/control.state")?;
    host.run("dpkg --purge ringhaul")?;
    host.run(&format!("test ! -e /var/lib/ringhaul/control.state; rm {disk} {notes}"))?;
    host.run("rmdir /var/lib/ringhaul /var/lib/ringhaul-own")?;
    let left = host.run(
        "find / /run -xdev -path /proc -prune -o -path /mnt -prune -o -iname '*ringhaul*' -print |
            grep -v -e ^/var/log -e ^/tmp -e ^/run/user -e ^/run/systemd || true",
    )?;
    ensure!(left.is_empty(), "the purge leaves:\n{left}");
    host.run("test -e /srv/disks/vm1.img; id ringhaul").map(drop)
}

#[test]
fn a_package_of_rpm_has_files_scripts_and_requirements() -> Result<()> {
    if !has_tools(&["cargo-cyclonedx", "cargo-generate-rpm", "rpm"])? {
        return Ok(());
    }
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR"))?;
    make("rpm", folder.path(), &[])?;
    let package = file_of(folder.path(), ".rpm")?;
    let query = |words: &[&str]| output(Command::new("rpm").arg("-qp").args(words).arg(&package));
    let files = query(&["--list"])?;
    let files: BTreeSet<&str> = files.lines().collect();
    for file in [
        "/usr/bin/ringhaul",
        "/usr/lib/ringhaul/upgrade-services",
        "/usr/lib/systemd/system/ringhaul.service",
        "/usr/lib/systemd/system/ringhaul@.service",
        "/usr/lib/sysusers.d/ringhaul.conf",
        "/usr/lib/tmpfiles.d/ringhaul.conf",
        "/usr/share/man/man1/ringhaul-serve.1.gz",
        "/usr/share/man/man5/ringhaul.toml.5.gz",
        "/usr/share/man/man7/ringhaul-disks.7.gz",
        "/usr/share/zsh/site-functions/_ringhaul",
        "/usr/share/licenses/ringhaul/LICENSE-MIT",
        "/usr/share/licenses/ringhaul/LICENSE-APACHE",
        "/usr/share/doc/ringhaul/docs/guide/first-vm.md",
    ] {
        ensure!(files.contains(file), "{file} is not among {files:?}");
    }
    ensure!(query(&["--configfiles"])?.trim() == "/etc/ringhaul.toml", "settings are replaced");
    let needs = query(&["--requires"])?;
    for need in ["systemd", "/bin/sh", "libc.so.6"] {
        ensure!(needs.lines().any(|line| line.starts_with(need)), "no {need} in {needs}");
    }
    let scripts = query(&["--scripts"])?;
    for words in ["postinstall", "upgrade-services", "preuninstall", "systemctl stop", "sysusers"] {
        ensure!(scripts.contains(words), "no {words} in {scripts}");
    }
    // Its scripts would change the machine, and its requirements belong to another distribution.
    let root = folder.path().join("root");
    fs::create_dir(&root)?;
    let mut install = Command::new("rpm");
    install.args(["--install", "--test", "--nodeps", "--root"]).arg(&root).arg(&package);
    output(&mut install).map(drop)
}

/// An image for containers, in a storage of its own, which is removed at the end.
struct Image {
    folder: TempDir,
    name: String,
}

impl Image {
    /// Makes the image on a base with the C library alone.
    fn make() -> Result<Self> {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR"))?;
        let at = |name: &str| folder.path().join(name);
        let [graph, state, own] = ["graph", "run", "tmp"].map(at);
        let storage = "[storage]\ndriver = \"vfs\"\n";
        let storage = format!("{storage}graphroot = {graph:?}\nrunroot = {state:?}\n");
        // The defaults of podman are above the limits of some machines.
        let limits =
            "[containers]\ndefault_ulimits = [\"nofile=4096:4096\", \"nproc=4096:4096\"]\n";
        let engine = format!("{limits}[engine]\nruntime = \"runc\"\ntmp_dir = {own:?}\n");
        fs::write(at("containers.conf"), engine)?;
        fs::write(at("storage.conf"), storage)?;
        for file in needed_files()? {
            let copy = at("base").join(file.trim_start_matches('/'));
            fs::create_dir_all(copy.parent().context("a library has a folder")?)?;
            fs::copy(&file, copy).with_context(|| format!("copying {file}"))?;
        }
        let name = format!("localhost/ringhaul:{}", env!("CARGO_PKG_VERSION"));
        let image = Self { folder, name };
        let archive = image.folder.path().join("base.tar");
        output(
            Command::new("tar").arg("-C").arg(image.at("base")).arg("-cf").arg(&archive).arg("."),
        )?;
        let base = "localhost/base:1";
        output(image.podman().arg("import").arg(&archive).arg(base))?;
        let settings = image.settings();
        let [first, second] = settings.each_ref().map(|(name, file)| (*name, file.as_str()));
        make("oci", &image.at("out"), &[("BASE", base), first, second])?;
        Ok(image)
    }

    fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn podman(&self) -> Command {
        let mut command = Command::new("podman");
        command.envs(self.settings());
        command
    }

    /// Variables that keep all state of podman in the folder.
    fn settings(&self) -> [(&'static str, String); 2] {
        let files =
            [("CONTAINERS_CONF", "containers.conf"), ("CONTAINERS_STORAGE_CONF", "storage.conf")];
        files.map(|(name, file)| (name, self.at(file).display().to_string()))
    }

    /// Starts a container with a disk and the folder of its socket.
    fn start(&self) -> Result<()> {
        for (folder, file) in [("sockets", None), ("disks", Some("vm1.img"))] {
            fs::create_dir(self.at(folder))?;
            if let Some(file) = file {
                File::create(self.at(folder).join(file))?.set_len(64 << 20)?;
            }
        }
        output(
            Command::new("chown")
                .args(["-R", "107:107"])
                .args(["sockets", "disks"].map(|folder| self.at(folder))),
        )?;
        let mut start = self.podman();
        start.args(["run", "--detach", "--name", "vm1", "--network", "none"]);
        start.arg(format!("--volume={}:/run/ringhaul", self.at("sockets").display()));
        start.arg(format!("--volume={}:/srv/disks", self.at("disks").display()));
        start.arg(&self.name).args([
            "serve",
            "--control",
            "/run/ringhaul/control",
            "--name",
            "vm1",
        ]);
        start.args(["--socket-path", "/run/ringhaul/vm1.sock", "--blk-file", "/srv/disks/vm1.img"]);
        output(&mut start).map(drop)
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        let _ = self.podman().args(["rm", "--force", "--all"]).output();
        let _ = self.podman().args(["rmi", "--force", "--all"]).output();
    }
}

/// The libraries that the tested program is linked with, and their loader.
fn needed_files() -> Result<Vec<String>> {
    let listed = output(Command::new("ldd").arg(ringhaul_binary()?))?;
    let words = listed.split_whitespace().filter(|word| word.starts_with('/'));
    Ok(words.map(str::to_owned).collect())
}

#[test]
fn an_image_serves_a_disk_from_a_container() -> Result<()> {
    if !can_change_system("containers")
        || !has_tools(&["cargo-cyclonedx", "podman", "runc", "conmon"])?
    {
        return Ok(());
    }
    let image = Image::make()?;
    image.start()?;
    let health = || run(image.podman().args(["healthcheck", "run", "vm1"]))?.expect_code(0);
    retry(LIMIT, || health().map(drop))?;
    let socket = image.at("sockets").join("vm1.sock");
    let load = "--rw randrw --verify --size 4m --number_ios 2000 --output-format json";
    run(&mut bench(&socket, load)?)?.expect_code(0)?;
    output(image.podman().args(["stop", "vm1"]))?;
    let state = "{{.State.ExitCode}} {{.State.Health.Status}}";
    let state = output(image.podman().args(["inspect", "--format", state, "vm1"]))?;
    ensure!(state.trim() == "0 healthy", "{state}");
    ensure!(file_of(&image.at("out"), ".tar")?.metadata()?.len() > BLOCK_BYTES as u64);
    Ok(())
}
