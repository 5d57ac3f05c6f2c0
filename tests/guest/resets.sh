# Resets the unit of /dev/$DISK, again and again. A reset ends commands in progress, and Linux
# repeats them: after each reset, a few hundred more commands must succeed.
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
