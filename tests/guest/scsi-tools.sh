# Queries the units of a virtio-scsi device with the tools of sg3-utils, and checks their output.
# $A is LUN 0 (writable, solid-state, serial $SERIAL), $B LUN 1 (read-only), $C LUN 2
# (rotational, no discard, its own names, obeys a stop), $D is target 1, LUN 300 with the WWN
# 3000000000000abc. Linux finds them in any order, and shows an address of LUN 300 as 16384 more.
at() {
    echo /dev/$(ls -d /sys/bus/scsi/devices/*:0:$1/block/* | sed 's,.*/,,')
}
A=$(at 0:0) B=$(at 0:1) C=$(at 0:2) D=$(at 1:16684)
fail() {
    echo "FAILED: $*"
    exit 1
}
# say WORDS COMMAND...: the output of the command contains the words.
say() {
    words=$1
    shift
    text=$("$@" 2>&1) || fail "$*: $text"
    echo "$text" | grep -q -e "$words" || fail "$* does not say '$words': $text"
}
# refuse WORDS COMMAND...: the command fails, and its output contains the words.
refuse() {
    words=$1
    shift
    if text=$("$@" 2>&1); then fail "$* is not refused"; fi
    echo "$text" | grep -q -i -e "$words" || fail "$* does not say '$words': $text"
}

say 'Vendor identification: Ringhaul' sg_inq "$A"
say 'Vendor identification: ACME' sg_inq "$C"
say 'Product identification: Old Disk' sg_inq "$C"
say 'Product revision level: 7.1' sg_inq "$C"
say 'vendor id: ACME' sg_vpd -p di "$C"
say 'Old Disk' cat /sys/block/${C#/dev/}/device/model
say "Unit serial number: $SERIAL" sg_vpd -p sn "$A"
say 'NAA' sg_vpd -p di "$A"
say '0x3000000000000abc' sg_vpd -p di "$D"
say 'Non-rotating medium' sg_vpd -p bdc "$A"
say 'Unmap command supported (LBPU): 1' sg_vpd -p lbpv "$A"
say 'Unmap command supported (LBPU): 0' sg_vpd -p lbpv "$C"
say 'Maximum unmap block descriptor count: 256' sg_vpd -p bl "$A"
say 'lbpme=1' sg_readcap -l "$A"
say 'Lun list length = 24 which imples 3 lun' sg_luns "$A"
say '412c' sg_luns "$D"
say 'Caching' sg_modes "$A"
say 'Get LBA status' sg_opcodes "$A"
say 'Command is supported' sg_opcodes -o 0x42 "$A"
say 'Query task set' sg_opcodes -t "$A"
sg_turs "$A" || fail 'it is not ready'
[ "$(cat /sys/block/${B#/dev/}/ro)" = 1 ] || fail 'B can be written'
[ "$(cat /sys/block/${A#/dev/}/queue/rotational)" = 0 ] || fail 'A rotates'
[ "$(cat /sys/block/${C#/dev/}/queue/rotational)" = 1 ] || fail 'C does not rotate'
[ "$(cat /sys/block/${C#/dev/}/queue/discard_max_bytes)" = 0 ] || fail 'C can be discarded'
[ "$(cat /sys/block/${A#/dev/}/queue/discard_max_bytes)" -gt 0 ] || fail 'A cannot be discarded'
say 'Relative target port: 0x1' sg_vpd -p di "$A"
say 't10.Ringhaul' cat /sys/block/${D#/dev/}/device/wwid

# Written data can be read, and a comparison fails where the data differ.
dd if=/dev/urandom of=/tmp/blocks bs=512 count=8 2>/dev/null
dd if=/tmp/blocks "of=$A" bs=512 seek=64 oflag=direct 2>/dev/null
sg_verify --lba=64 --count=8 "$A" || fail 'the medium cannot be read'
sg_verify --lba=64 --count=8 --ebytchk=1 --in=/tmp/blocks --ndo=4096 "$A" || fail 'it differs'
refuse 'miscompare' sg_verify --lba=65 --count=8 --ebytchk=1 --in=/tmp/blocks --ndo=4096 "$A"
printf 'ABCDEFGH' >/tmp/pattern
dd if=/dev/zero bs=504 count=1 2>/dev/null >>/tmp/pattern
sg_write_same --10 --lba=100 --num=5 --in=/tmp/pattern --xferlen=512 "$A" || fail 'write same'
dd "if=$A" bs=512 skip=104 count=1 iflag=direct 2>/dev/null | cmp - /tmp/pattern || fail 'same'
sg_write_same --16 --unmap --lba=100 --num=5 --xferlen=512 "$A" || fail 'write same with unmap'
dd "if=$A" bs=512 skip=104 count=1 iflag=direct 2>/dev/null | tr -d '\0' | wc -c | grep -qx 0 ||
    fail 'blocks that were unmapped by write same are not zero'
dd if=/dev/zero bs=512 count=1 2>/dev/null >/tmp/pair
cat /tmp/pattern >>/tmp/pair
pair="--in=/tmp/pair --xferlen=1024"
sg_compare_and_write --lba=200 $pair "$A" || fail 'compare and write'
dd "if=$A" bs=512 skip=200 count=1 iflag=direct 2>/dev/null | cmp - /tmp/pattern || fail 'pair'
refuse 'miscompare' sg_compare_and_write --lba=200 $pair "$A"

# Reservations, with keys that are kept.
persist() {
    sg_persist --no-inquiry "$@" "$A"
}
persist --out --register --param-aptpl --param-sark=abc >/dev/null || fail 'register'
persist --out --reserve --prout-type=5 --param-rk=abc >/dev/null || fail 'reserve'
say '0xabc' persist --in --read-keys
say 'Write Exclusive, registrants only' persist --in --read-reservation
say 'Persist Through Power Loss Capable(PTPL_C): 1' persist --in --report-capabilities
refuse 'reservation conflict' persist --out --reserve --prout-type=5 --param-rk=1
persist --out --clear --param-rk=abc >/dev/null || fail 'clear'
dd "if=$A" bs=512 skip=64 count=8 iflag=direct 2>/dev/null | cmp - /tmp/blocks ||
    fail 'what was written is gone'
say '[0-9] *mapped' sg_get_lba_status --lba=64 "$A"
sg_unmap --force --lba=64 --num=8 "$A" || fail 'unmap'
dd "if=$A" bs=512 skip=64 count=8 iflag=direct 2>/dev/null | tr -d '\0' | wc -c | grep -qx 0 ||
    fail 'blocks that were unmapped are not zero'
say 'deallocated' sg_get_lba_status --lba=64 "$A"
sg_sync "$A" || fail 'synchronize cache'
refuse 'out of range' sg_verify --lba=0x10000000 --count=1 "$A"
refuse 'invalid field' sg_raw -r 512 "$A" 28 e0 00 00 00 00 00 00 01 00
refuse 'invalid command operation code' sg_raw "$A" c1 00 00 00 00 00
sg_start --stop "$C" || fail 'stop'
refuse 'not ready' sg_turs -v "$C"
sg_start --start "$C" || fail 'start'
sg_turs "$C" || fail 'it has not started'
sg_start --eject "$C" || fail 'eject'
sg_turs "$C" || fail 'it was taken out'
sg_start --load "$C" || fail 'load'
# A unit without stop=obey ignores a stop.
sg_start --stop "$A" || fail 'stop of A'
sg_turs "$A" || fail 'A has stopped'
sg_prevent --prevent=1 "$A" || fail 'prevent medium removal'
sg_prevent --allow "$A" || fail 'allow medium removal'
# A reset starts a stopped unit, and is reported at most once: Linux may consume the report.
sg_start --stop "$C" || fail 'stop before a reset'
refuse 'not ready' sg_turs -v "$C"
sg_reset --device "$C" || fail 'reset of a unit'
sg_turs "$C" || sg_turs "$C" || fail 'it is not ready after a reset'
echo all
