//! Examples and exit statuses at the end of the help.

pub(crate) const SERVE: &str = "\
Examples:
  ringhaul serve --socket-path /run/vm1.sock --blk-file vm1.img
  ringhaul serve --control /run/ringhaul/control --iothreads 2 \\
      --export name=vm1,socket-path=/run/vm1.sock,disk=qcow2:/srv/vm1.qcow2 \\
      --export name=vm2,socket-path=/run/vm2.sock,blk-file=/dev/vg/vm2

Status: 0, stopped by a signal, or the last front-end of --fd has left; 2, it could not start; 3, \
a second signal ended it before all requests were answered; 4, an IoThread failed.";

pub(crate) const CHECK: &str = "\
Examples:
  ringhaul check /etc/ringhaul.toml
  ringhaul check vms.toml --iothreads 4

Status: 0, it can be served as far as that shows without opening a disk; 2, it cannot.";

pub(crate) const BENCH: &str = "\
Examples:
  ringhaul bench --socket-path /run/vm1.sock --rw randread --bs 4k --iodepth 32 --runtime 10
  ringhaul bench --filename vm1.img --rw randrw --verify --size 1g --output-format json

Status: 0, all requests succeeded and all data was right; 1, a request failed, data was wrong, or \
the server left; 2, the options make no sense, or the server cannot be reached.";

pub(crate) const DISK_INFO: &str = "\
Examples:
  ringhaul disk info vm1.img
  ringhaul disk info qcow2:/srv/vm1.qcow2,backing=beside --json

Status: 0, it is printed; 2, the disk cannot be opened.";

pub(crate) const DISK_BENCH: &str = "\
Examples:
  ringhaul disk bench /dev/vg/vm1
  ringhaul disk bench vm1.img --rw randwrite --destroy-contents

Status: 0, all requests succeeded; 1, a request failed; 2, the disk cannot be opened.";

pub(crate) const COMPLETIONS: &str = "\
Examples:
  source <(ringhaul completions bash)
  ringhaul completions zsh > /usr/local/share/zsh/site-functions/_ringhaul
  ringhaul completions fish > ~/.config/fish/completions/ringhaul.fish";
