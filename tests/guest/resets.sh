# Resets the unit that is /dev/$DISK, again and again. Commands that are in progress end with that,
# and Linux begins them again: after each reset, it must have done a few hundred more.
done_so_far() {
    awk '{ print $1 + $5 }' "/sys/block/$DISK/stat"
}
for reset in 1 2 3 4 5 6 7 8; do
    sg_reset --device "/dev/$DISK" >/dev/null || exit 1
    before=$(done_so_far)
    until [ "$(done_so_far)" -gt $((before + 200)) ]; do
        usleep 10000
    done
done
