# Deletes a part of the files of files-write.sh on /dev/$DISK and lets the file system discard their
# space. The other files must stay. $DELETED is the folder below /mnt/files.
mount -t ext4 "/dev/$DISK" /mnt
[ -d "/mnt/files/$DELETED" ] || { echo "there is no folder $DELETED"; exit 1; }
rm -r "/mnt/files/$DELETED"
grep -v "  $DELETED/" /mnt/checksums >/tmp/kept
sync
fstrim -v /mnt
echo 3 >/proc/sys/vm/drop_caches
cd /mnt/files
md5sum -c -s /tmp/kept || { echo "a discard has hit other files"; exit 1; }
cd /
umount /mnt
