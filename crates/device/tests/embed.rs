//! The example `embed`, which is documentation, does what it says.

#[path = "../examples/embed.rs"]
mod embed;

#[test]
fn a_vmm_embeds_the_device() {
    if let Err(error) = embed::main() {
        panic!("{error:#}");
    }
}
