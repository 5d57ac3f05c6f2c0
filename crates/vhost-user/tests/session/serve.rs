//! A session that its own thread drives.

use std::os::unix::net::UnixStream;

use vhost_user::message::Request;
use vhost_user::{End, serve};

use crate::scene::{Frontend, Scene};

#[test]
fn a_thread_serves_one_front_end_until_it_disconnects() {
    let scene = Scene::new();
    let (ours, theirs) = UnixStream::pair().unwrap();
    let (device, threads) = (scene.device.clone(), vec![scene.io.remote()]);
    let server = std::thread::spawn(move || serve(ours, device, threads).unwrap());
    let mut frontend = Frontend::new(theirs);
    for _ in 0..2 {
        frontend.send(&Request::GetFeatures, false, &[]);
        let (_, body) = frontend.receive().unwrap();
        let features = u64::from_ne_bytes(body.try_into().unwrap());
        assert_eq!(features & scene.device.features(), scene.device.features());
    }
    drop(frontend);
    assert_eq!(server.join().unwrap(), End::Gone(None));
}
