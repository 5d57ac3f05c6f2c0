//! The simulation as a program: see the library.

#[cfg(ringhaul_sim)]
use ringhaul_sim::main;

#[cfg(not(ringhaul_sim))]
fn main() -> std::process::ExitCode {
    eprintln!("this build has no simulated kernel; `cargo xtask sim` makes one that has");
    std::process::ExitCode::FAILURE
}
