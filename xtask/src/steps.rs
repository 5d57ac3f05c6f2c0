//! The steps of a check run, as cargo command lines.

use std::process::Command;

use ringhaul_tools::workspace;

use crate::long_tests;

/// A check: a name and a cargo command line.
pub(crate) struct Step {
    pub(crate) name: &'static str,
    /// The words after `cargo`; `xtask` as the first one stands for this program.
    pub(crate) words: &'static str,
    /// True if the kernel is a simulated one.
    pub(crate) is_simulated: bool,
    /// Environment variables of its command.
    pub(crate) env: &'static [(&'static str, &'static str)],
    /// The folder that it builds in.
    pub(crate) folder: Folder,
    /// The steps that must pass before it begins.
    pub(crate) needs: &'static [&'static str],
    /// True if it leaves the processors idle for most of its time.
    pub(crate) waits: bool,
    /// True if no other step runs beside it.
    pub(crate) is_alone: bool,
    /// True if the quick run skips it.
    pub(crate) slow: bool,
    /// The seconds that it takes among the other steps on two idle cores, after `cargo clean`.
    pub(crate) usual: u64,
    /// The time limit in minutes. It only ends a hopeless wait: on a slow and busy machine a step
    /// takes a fraction of it.
    pub(crate) minutes: u64,
}

/// A folder of build results. Cargo lets only one command build in it at a time.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Folder {
    /// The step builds nothing, or finds everything built.
    None,
    Debug,
    Release,
    Simulation,
    Lab,
    Models,
    Fuzz,
}

impl Step {
    /// The command in the root of the tree, with its environment.
    pub(crate) fn command(&self) -> Command {
        let mut words = self.arguments();
        let mut command = match words[..] {
            ["xtask", ..] => {
                words.remove(0);
                // Cargo would wait for other builds, and may have put a new program in its place.
                let mut command = Command::new("/proc/self/exe");
                command.current_dir(workspace::root());
                command
            }
            _ => workspace::cargo(),
        };
        command.args(words).envs(self.env.iter().copied());
        command
    }

    /// The command for people.
    pub(crate) fn command_line(&self) -> String {
        format!("cargo {}", self.arguments().join(" "))
    }

    pub(crate) fn needs_binary(&self) -> bool {
        self.needs.contains(&RELEASE_BUILD)
    }

    fn arguments(&self) -> Vec<&str> {
        let mut words: Vec<&str> = self.words.split_whitespace().collect();
        if self.is_simulated {
            words.splice(1..1, ["--config", long_tests::SIM_CONFIG, "--profile", "sim"]);
        }
        words
    }
}

/// The steps of a run, of all checks or the quick ones.
pub(crate) fn selected(all: bool) -> impl Iterator<Item = &'static Step> {
    let quick = if all { &[] } else { QUICK };
    STEPS.iter().filter(move |step| all || !step.slow).chain(quick)
}

pub(crate) const STEP: Step = Step {
    name: "",
    words: "",
    is_simulated: false,
    env: &[],
    folder: Folder::None,
    needs: &[],
    waits: false,
    is_alone: false,
    slow: false,
    usual: 1,
    minutes: 60,
};

const SLOW: Step = Step { slow: true, ..STEP };

/// The time limit of a single test in minutes. A guest without KVM that waits for other tests takes
/// a fraction of it.
pub(crate) const TEST_MINUTES: u64 = 30;

const RELEASE_BUILD: &str = "release build";
const FENCES_BUILD: &str = "fences, build";
const TEST_BUILD: &str = "clippy, tests, build";

/// Clippy's compiler in place of rustc for the workspace's own crates: it also generates code. So
/// the build of the tests needs no separate pass of `cargo clippy`. A later step with other
/// variables would build again.
const CLIPPY: &[(&str, &str)] =
    &[("RUSTC_WORKSPACE_WRAPPER", "clippy-driver"), ("CLIPPY_ARGS", "--deny=warnings")];

/// Tests of the daemon.
const END_TO_END: Step =
    Step { env: CLIPPY, needs: &[TEST_BUILD, RELEASE_BUILD], minutes: 120, ..SLOW };

/// A check of `disks` with one of its features: the kinds of disks need no other kind.
macro_rules! disks_check {
    ($part:literal, $features:literal) => {
        Step {
            name: concat!("clippy, disks ", $part),
            words: concat!(
                "clippy --package disks --no-default-features ",
                $features,
                " --all-targets -- --deny warnings"
            ),
            folder: Folder::Debug,
            usual: 8,
            ..SLOW
        }
    };
}

/// The steps in the order in which they begin, as far as the folders and needs of each permit it.
/// Tests that `cargo` finds built need its folder for a moment, so all steps that build in that
/// folder come first.
const STEPS: &[Step] = &[
    Step { name: "format", words: "fmt --all --check", ..STEP },
    Step { name: "format, lab", words: "fmt --manifest-path lab/Cargo.toml --check", ..STEP },
    Step { name: "tidy", words: "xtask tidy", usual: 5, ..STEP },
    Step {
        name: "dependencies",
        // Not the advisories: they change without the tree, and are fetched from the network.
        words: "deny --workspace check bans licenses sources",
        ..SLOW
    },
    Step {
        // Other packages of the workspace switch its features on.
        name: "clippy, blockio alone",
        words: "clippy --package blockio --no-default-features --lib -- --deny warnings",
        folder: Folder::Debug,
        usual: 25,
        ..STEP
    },
    Step {
        // The program of `make demo`: a newcomer sees its warnings.
        name: "clippy, demo",
        words: "clippy --package ringhaul-cli --no-default-features -- --deny warnings",
        folder: Folder::Debug,
        usual: 25,
        ..SLOW
    },
    disks_check!("alone", ""),
    disks_check!("with LUKS", "--features luks"),
    disks_check!("with TLS", "--features nbd-tls"),
    disks_check!("with images", "--features qcow2"),
    disks_check!("with RBD", "--features rbd"),
    disks_check!("with schemas", "--features schema"),
    Step {
        name: RELEASE_BUILD,
        words: "build --release --package ringhaul-cli",
        folder: Folder::Release,
        usual: 400,
        minutes: 120,
        ..SLOW
    },
    Step {
        name: "documentation",
        words: "doc --workspace --no-deps --document-private-items",
        // Private items are documented too, so links to them are fine.
        env: &[("RUSTDOCFLAGS", "--deny warnings --allow rustdoc::private-intra-doc-links")],
        folder: Folder::Debug,
        usual: 135,
        ..SLOW
    },
    Step {
        name: TEST_BUILD,
        words: "build --workspace --all-targets",
        env: CLIPPY,
        folder: Folder::Debug,
        usual: 490,
        ..SLOW
    },
    Step {
        name: "tests, guests",
        words: "test --workspace --test guest",
        usual: 850,
        minutes: 240,
        ..END_TO_END
    },
    Step {
        name: "tests, rbd",
        words: "test --workspace --test rbd",
        waits: true,
        usual: 370,
        ..END_TO_END
    },
    Step {
        name: "tests, faults",
        words: "test --workspace --test faults -- --test-threads 4",
        waits: true,
        usual: 120,
        ..END_TO_END
    },
    Step {
        name: "tests, cli",
        words: "test --workspace --test cli -- --test-threads 4",
        waits: true,
        usual: 120,
        ..END_TO_END
    },
    Step {
        name: "tests, end to end",
        words: "test --workspace --no-fail-fast --test crash --test device --test hostile \
                --test image_edges --test images --test load --test luks --test neighbours \
                --test power -- --test-threads 4",
        waits: true,
        usual: 360,
        ..END_TO_END
    },
    Step {
        name: "tests, units",
        words: "test --workspace --no-fail-fast --lib --bins --test daemon --test disk \
                --test embed --test it --test packages --test qemu_storage_daemon --test sandbox \
                --test scsi --test session",
        env: CLIPPY,
        needs: &[TEST_BUILD],
        usual: 140,
        ..SLOW
    },
    Step {
        name: "tests, examples in comments",
        words: "test --workspace --doc",
        env: CLIPPY,
        needs: &[TEST_BUILD],
        usual: 30,
        ..SLOW
    },
    Step {
        // Code with a simulated kernel is a separate build.
        name: "clippy, simulation",
        words: "xtask sim --seeds 20000",
        env: CLIPPY,
        folder: Folder::Simulation,
        usual: 450,
        ..SLOW
    },
    Step {
        name: "clippy, tests, simulation",
        words: "test --package ringhaul-sim",
        is_simulated: true,
        env: CLIPPY,
        folder: Folder::Simulation,
        usual: 40,
        ..SLOW
    },
    Step {
        name: "clippy, tests, simulated futures",
        words: "test --package blockio --lib contract_tests::simulated",
        is_simulated: true,
        env: CLIPPY,
        folder: Folder::Simulation,
        usual: 70,
        ..SLOW
    },
    Step { name: "models", words: "xtask loom", folder: Folder::Models, usual: 200, ..SLOW },
    Step {
        // The targets run with nightly Rust only, but are valid for any.
        name: "check, fuzz",
        words: "check --manifest-path fuzz/Cargo.toml --bins",
        folder: Folder::Fuzz,
        usual: 35,
        ..SLOW
    },
    Step {
        name: "fuzz",
        words: "xtask fuzz --seconds 15",
        // The build takes longer than the runs.
        env: &[("CARGO_PROFILE_RELEASE_OPT_LEVEL", "1")],
        folder: Folder::Fuzz,
        usual: 290,
        ..SLOW
    },
    Step {
        name: "clippy, lab",
        words: "clippy --manifest-path lab/Cargo.toml --all-targets -- --deny warnings",
        folder: Folder::Lab,
        usual: 45,
        ..SLOW
    },
    Step {
        name: "tests, lab",
        words: "test --manifest-path lab/Cargo.toml",
        folder: Folder::Lab,
        usual: 60,
        ..SLOW
    },
    Step {
        name: FENCES_BUILD,
        words: "test --release --package virtqueue --test it --no-run",
        folder: Folder::Release,
        usual: 75,
        ..SLOW
    },
    Step {
        // A missing fence has an effect in optimised code only, on two processors at a time.
        name: "fences",
        words: "test --release --package virtqueue --test it litmus",
        needs: &[FENCES_BUILD],
        is_alone: true,
        usual: 5,
        ..SLOW
    },
    Step {
        // It changes settings of the machine, with which other daemons would not start.
        name: "tests, system settings",
        words: "test --workspace --test system_settings",
        is_alone: true,
        usual: 5,
        ..END_TO_END
    },
];

/// Steps of the quick run alone.
const QUICK: &[Step] = &[
    Step {
        name: "clippy",
        words: "clippy --workspace --all-targets -- --deny warnings",
        folder: Folder::Debug,
        usual: 135,
        ..STEP
    },
    Step {
        name: "unit tests",
        words: "test --workspace --lib --bins",
        folder: Folder::Debug,
        usual: 240,
        ..STEP
    },
    // They take seconds, and detect most faults of a ring.
    Step {
        name: "rings",
        words: "test --package virtqueue --test it",
        folder: Folder::Debug,
        usual: 20,
        ..STEP
    },
    Step {
        name: "sessions",
        words: "test --package vhost-user --test session",
        folder: Folder::Debug,
        usual: 20,
        ..STEP
    },
];

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    const QUICK_NAMES: &[&str] = &[
        "format",
        "format, lab",
        "tidy",
        "clippy, blockio alone",
        "clippy",
        "unit tests",
        "rings",
        "sessions",
    ];

    #[test]
    fn the_quick_run_skips_slow_steps() {
        let names = |all| selected(all).map(|step| step.name).collect::<Vec<_>>();
        assert_eq!(names(false), QUICK_NAMES);
        assert!(names(true).contains(&"tests, guests") && !names(true).contains(&"rings"));
    }

    #[test]
    fn each_feature_of_disks_has_a_check() {
        let manifest: toml::Table = include_str!("../../crates/disks/Cargo.toml").parse().unwrap();
        let features = manifest["features"].as_table().unwrap().keys().map(String::as_str);
        let features: BTreeSet<&str> = features.filter(|feature| *feature != "default").collect();
        let words = selected(true).map(|step| step.words);
        let words = words.filter(|words| words.starts_with("clippy --package disks "));
        let checked =
            words.filter_map(|words| words.split_once("--features ")?.1.split(' ').next());
        assert_eq!(checked.collect::<BTreeSet<_>>(), features);
    }

    #[test]
    fn every_step_has_time_for_its_tests_and_an_end() {
        for Step { name, minutes, .. } in selected(true).chain(QUICK) {
            assert!((TEST_MINUTES + 1..=240).contains(minutes), "{name}");
        }
    }

    #[test]
    fn steps_need_steps_before_them() {
        let names: Vec<&str> = selected(true).map(|step| step.name).collect();
        for (index, step) in selected(true).enumerate() {
            let is_before = |name: &&str| names[..index].contains(name);
            assert!(step.needs.iter().all(is_before), "{}", step.name);
        }
    }

    #[test]
    fn settings_of_the_machine_change_beside_no_other_step() {
        let mut steps = selected(true).filter(|step| step.words.contains("system_settings"));
        assert!(steps.all(|step| step.is_alone));
    }

    #[test]
    fn every_integration_test_belongs_to_a_step() {
        let output = workspace::cargo()
            .args(["metadata", "--no-deps", "--offline", "--format-version", "1"])
            .output()
            .unwrap();
        let metadata: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        let packages = metadata["packages"].as_array().unwrap();
        let targets = packages.iter().flat_map(|package| package["targets"].as_array().unwrap());
        let tests = targets.filter(|target| target["kind"][0] == "test");
        let tests: BTreeSet<&str> = tests.map(|test| test["name"].as_str().unwrap()).collect();
        let of_debug = selected(true).filter(|step| step.words.starts_with("test --workspace "));
        let words: Vec<&str> = of_debug.flat_map(|step| step.words.split_whitespace()).collect();
        let named = words.windows(2).filter(|pair| pair[0] == "--test").map(|pair| pair[1]);
        assert_eq!(named.collect::<BTreeSet<_>>(), tests);
    }
}
