//! The clock of the loop: the kernel's monotonic clock, unless kernels are simulated.

#[cfg_attr(ringhaul_sim, path = "clock/sim.rs")]
#[cfg_attr(not(ringhaul_sim), path = "clock/linux.rs")]
mod chosen;

pub use chosen::*;
