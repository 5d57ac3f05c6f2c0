# Mounts /dev/$DISK at /mnt with nothing cached and compares all files with their checksums.
if grep -q ' /mnt ' /proc/mounts; then umount /mnt; fi
echo 3 >/proc/sys/vm/drop_caches
mount -t ext4 "/dev/$DISK" /mnt
cd /mnt/files
md5sum -c -s /mnt/checksums || { echo "files have changed"; exit 1; }
wc -l </mnt/checksums
cd /
umount /mnt
