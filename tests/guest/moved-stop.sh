# Ends the loads of moved-start.sh, which have found no error, and checks the file systems.
touch /tmp/stop
for disk in $DISKS; do
    for load in "/tmp/$disk.fio" "/tmp/$disk.tree"; do
        until [ -e "$load.status" ]; do
            usleep 50000
        done
        [ "$(cat "$load.status")" = 0 ] || { cat "$load"; exit 1; }
    done
    umount "/mnt/$disk"
done
echo 3 >/proc/sys/vm/drop_caches
for disk in $DISKS; do
    e2fsck -f -n "/dev/$disk"
done
