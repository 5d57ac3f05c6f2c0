//! The example `embed`, which is documentation, must work.

#[path = "../examples/embed.rs"]
mod embed;

#[test]
fn a_vmm_embeds_the_device() {
    if let Err(error) = embed::main() {
        panic!("{error:#}");
    }
}
