# Ends the loads of moved-start.sh, which have found no error, and checks the file system.
touch /tmp/stop
until [ -e /tmp/tree.status ] && ! ps | grep -q '[f]io --name=verify'; do
    usleep 50000
done
[ ! -e /tmp/fio.failed ] || { cat /tmp/fio.log; exit 1; }
[ "$(cat /tmp/tree.status)" = 0 ] || { cat /tmp/tree.log; exit 1; }
umount /mnt
echo 3 >/proc/sys/vm/drop_caches
e2fsck -f -n "/dev/$DISK"
