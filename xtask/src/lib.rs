//! The part of the development tasks that the end-to-end tests use too: real guests.

pub mod guest;
