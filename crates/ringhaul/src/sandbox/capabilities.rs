//! The capabilities that a daemon of root keeps.

use anyhow::{Context, Result};
use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities};

use super::rules::Rules;

/// Ports below need a capability.
const PRIVILEGED_PORTS: u16 = 1024;

/// Drops all capabilities but the needed ones from this thread and all that it starts.
///
/// # Errors
///
/// When the kernel refuses.
pub(super) fn drop_unused(rules: &Rules) -> Result<()> {
    keep(needed(rules))
}

/// The capabilities of a daemon.
fn needed(rules: &Rules) -> CapabilitySet {
    // Disks, keys and folders of sockets often belong to other users. Guest memory and keys may
    // exceed the limit on locked memory.
    let mut needed = CapabilitySet::DAC_OVERRIDE | CapabilitySet::IPC_LOCK;
    rules.capabilities.iter().for_each(|kept| needed |= *kept);
    if rules.listen_port.is_some_and(|port| port < PRIVILEGED_PORTS) {
        needed |= CapabilitySet::NET_BIND_SERVICE;
    }
    needed
}

/// Drops all capabilities that are not in the set.
pub(super) fn keep(needed: CapabilitySet) -> Result<()> {
    let has = capabilities(None).context("cannot determine the capabilities of the process")?;
    let kept = has.permitted & needed;
    // A service manager that has taken them all may deny the call, too.
    if has.permitted == kept && (has.inheritable & !kept).is_empty() {
        return Ok(());
    }
    let sets =
        CapabilitySets { permitted: kept, effective: kept, inheritable: CapabilitySet::empty() };
    set_capabilities(None, sets).context("cannot drop capabilities")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_privileged_port_and_the_choice_of_the_user_need_more_capabilities() {
        let of = |change: &dyn Fn(&mut Rules)| {
            let mut rules = Rules::default();
            change(&mut rules);
            needed(&rules)
        };
        let always = CapabilitySet::DAC_OVERRIDE | CapabilitySet::IPC_LOCK;
        assert_eq!(of(&|_| {}), always);
        assert_eq!(of(&|rules| rules.listen(1024)), always);
        assert_eq!(of(&|rules| rules.listen(1023)), always | CapabilitySet::NET_BIND_SERVICE);
        let kept = of(&|rules| rules.keep(CapabilitySet::SYS_NICE));
        assert_eq!(kept, always | CapabilitySet::SYS_NICE);
    }

    /// A program that the daemon executes would have them.
    #[test]
    fn nothing_is_left_to_inherit() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let run = || {
            let needed = CapabilitySet::IPC_LOCK;
            let inheritable = CapabilitySet::SYS_ADMIN;
            set_capabilities(None, CapabilitySets { inheritable, ..capabilities(None).unwrap() })
                .unwrap();
            let (permitted, effective) = (needed, needed);
            set_capabilities(None, CapabilitySets { permitted, effective, inheritable }).unwrap();
            assert_eq!(capabilities(None).unwrap().inheritable, inheritable);
            keep(needed).unwrap();
            let left = capabilities(None).unwrap();
            assert_eq!((left.permitted, left.effective), (needed, needed));
            assert!(left.inheritable.is_empty());
        };
        std::thread::scope(|scope| scope.spawn(run).join()).unwrap();
    }
}
