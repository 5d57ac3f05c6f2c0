# A file system in User Mode Linux: made, written, read again after a remount, trimmed, checked.
fail() {
    echo "FAILED: $*"
    exit 1
}
[ -b /dev/vda ] || fail 'there is no disk'
echo "serial=$(cat /sys/block/vda/serial) sectors=$(cat /sys/block/vda/size)"
/usr/sbin/mke2fs -q -t ext4 -F /dev/vda
mount -t ext4 /dev/vda /mnt
for number in 1 2 3 4 5 6 7 8; do
    dd if=/dev/urandom of=/mnt/$number bs=64k count=32 2>/dev/null
done
(cd /mnt && sha1sum 1 2 3 4 5 6 7 8 >sums)
umount /mnt
echo 3 >/proc/sys/vm/drop_caches
mount -t ext4 /dev/vda /mnt
(cd /mnt && sha1sum -c -s sums) || fail 'files have changed'
rm /mnt/[1-4]
sync
fstrim -v /mnt
(cd /mnt && sha1sum 5 6 7 8 | grep -v -F -f sums) && fail 'a discard has hit other files'
umount /mnt
/usr/sbin/e2fsck -f -n /dev/vda
