//! The process: limits, descriptors, groups and the service manager.

pub(crate) mod cgroup;
pub(crate) mod descriptor_limit;
pub mod file_limit;
pub(crate) mod group;
pub(crate) mod inherit;
pub mod memory_limits;
pub(crate) mod service_manager;
pub mod version;
