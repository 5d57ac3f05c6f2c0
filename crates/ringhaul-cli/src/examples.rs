//! Examples in the help texts, and the statuses of commands.

pub(crate) const PROGRAM: &str = "\
Examples:
  ringhaul demo
  ringhaul serve --socket-path /run/vm1.sock --blk-file vm1.img
  ringhaul ctl list";

pub(crate) const SERVE_SUMMARY: &str = "\
Examples:
  ringhaul serve --socket-path /run/vm1.sock --blk-file vm1.img
  ringhaul serve --config /etc/ringhaul.toml

These are the common options; `ringhaul serve --help` has all.";

pub(crate) const SERVE: &str = "\
Examples:
  ringhaul serve --socket-path /run/vm1.sock --blk-file vm1.img
  ringhaul serve --control /run/ringhaul/control --iothreads 2 \\
      --export name=vm1,socket-path=/run/vm1.sock,disk=qcow2:/srv/vm1.qcow2 \\
      --export name=vm2,socket-path=/run/vm2.sock,blk-file=/dev/vg/vm2

Status: 0, stopped by a signal, or the last front-end of --fd has left; 2, it could not start; 3, \
a second signal ended it before all requests were answered; 4, an IoThread failed; 5, with \
--sandbox strict, a thread made a system call that it does not need.";

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

pub(crate) const DISK: &str = "\
Examples:
  ringhaul disk info vm1.img
  ringhaul disk bench /dev/vg/vm1";

pub(crate) const DEMO: &str = "\
Examples:
  ringhaul demo
  ringhaul demo --size 1024 --runtime 30";

pub(crate) const VERSION: &str = "\
Examples:
  ringhaul version
  ringhaul version | grep engines";

pub(crate) const CTL: &str = concat!(
    "Examples:\n  ringhaul ctl --control /run/ringhaul/control list\n",
    "  ringhaul ctl add --name vm3 --socket-path /run/vm3.sock --blk-file vm3.img\n",
    "  ringhaul ctl set-disk vm3 iops-total=500\n\n",
    "Status: 0, it is done; 1, the daemon has refused, or has tried and failed, or `doctor` has ",
    "found a fault; 2, the command ",
    "makes no sense, or the daemon cannot be reached; 3, a removal was not finished by its ",
    "deadline, and continues; 4, an upgrade was refused and may succeed in a moment; 5, an ",
    "upgrade was refused for good.",
);

pub(crate) const CTL_PING: &str = "\
Examples:
  ringhaul ctl ping
  ringhaul ctl --control /run/ringhaul-vm1/control ping";

pub(crate) const CTL_LIST: &str = "\
Examples:
  ringhaul ctl list
  ringhaul ctl list --json";

pub(crate) const CTL_SHOW: &str = "\
Examples:
  ringhaul ctl show vm1
  ringhaul ctl show /run/ringhaul/vm1.sock --json";

pub(crate) const CTL_ADD: &str = "\
Examples:
  ringhaul ctl add --name vm3 --socket-path /run/vm3.sock --blk-file vm3.img
  ringhaul ctl add --export socket-path=/run/vm4.sock,disk=qcow2:/srv/vm4.qcow2";

pub(crate) const CTL_REMOVE: &str = "\
Examples:
  ringhaul ctl remove vm3
  ringhaul ctl remove vm3 --force --deadline 10";

pub(crate) const CTL_ADD_LUN: &str = "\
Examples:
  ringhaul ctl add-lun vm1 1,serial=data,blk-file=/srv/data.img
  ringhaul ctl add-lun vm1 0:2,disk=qcow2:/srv/more.qcow2";

pub(crate) const CTL_REMOVE_LUN: &str = "\
Examples:
  ringhaul ctl remove-lun vm1 1
  ringhaul ctl remove-lun vm1 0:2";

pub(crate) const CTL_RESIZE: &str = "\
Examples:
  ringhaul ctl resize vm1 +10G
  ringhaul ctl resize vm1 2 40G
  ringhaul ctl resize vm1 5G --shrink";

pub(crate) const CTL_SET_DISK: &str = "\
Examples:
  ringhaul ctl set-disk vm1 iops-total=500 group=gold
  ringhaul ctl set-disk vm1 2 werror=hold";

pub(crate) const CTL_RESUME: &str = "\
Examples:
  ringhaul ctl resume vm1
  ringhaul ctl resume vm1 2";

pub(crate) const CTL_STATE: &str = "\
Examples:
  ringhaul ctl state save vm1 > vm1.json
  ringhaul ctl state load vm1 < vm1.json
  ringhaul ctl state save vm1 | ssh target ringhaul ctl state load vm1";

pub(crate) const CTL_SET: &str = "\
Examples:
  ringhaul ctl set
  ringhaul ctl set log=warn,blockio=debug poll-max-us=0";

pub(crate) const CTL_STATS: &str = "\
Examples:
  ringhaul ctl stats
  ringhaul ctl stats --json";

pub(crate) const CTL_TOP: &str = "\
Examples:
  ringhaul ctl top --sort p99
  ringhaul ctl top vm1
  ringhaul ctl top --once --json";

pub(crate) const CTL_DOCTOR: &str = "\
Examples:
  ringhaul ctl doctor
  ringhaul ctl doctor vm1 --bundle report.json";

pub(crate) const CTL_METRICS: &str = "\
Examples:
  ringhaul ctl metrics
  ringhaul ctl metrics > /var/lib/node_exporter/ringhaul.prom";

pub(crate) const CTL_EVENTS: &str = "\
Examples:
  ringhaul ctl events
  ringhaul ctl events error gone --json";

pub(crate) const CTL_UPGRADE: &str = "\
Examples:
  ringhaul ctl upgrade /usr/bin/ringhaul
  ringhaul ctl upgrade --retry 30 /usr/bin/ringhaul";

pub(crate) const CTL_SCHEMA: &str = "\
Examples:
  ringhaul ctl schema
  ringhaul ctl schema > methods.json";

pub(crate) const CTL_SHUTDOWN: &str = "\
Examples:
  ringhaul ctl shutdown
  ringhaul ctl shutdown --wait";

pub(crate) const CTL_CALL: &str = "\
Examples:
  ringhaul ctl call export.list
  ringhaul ctl call export.remove '{\"export\": \"vm1\"}'";
