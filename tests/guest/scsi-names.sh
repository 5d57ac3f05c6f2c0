# Prints one line for each SCSI disk in a guest with udev: its address, its names in
# /dev/disk/by-id by the rules of udev and sg3-utils, and the output of lsblk. The script writes the
# database in /run/udev that the rules would write.
mkdir -p /run/udev/data
for path in /sys/bus/scsi/devices/*/block/*; do
    disk=${path##*/}
    address=${path#/sys/bus/scsi/devices/*:*:}
    address=${address%%/*}
    {
        echo I:1
        scsi_id --export --whitelisted --device=/dev/"$disk" | sed 's/^/E:/'
    } >"/run/udev/data/b$(cat "$path/dev")"
    udev() {
        sed -n "s/^E:$1=//p" "/run/udev/data/b$(cat "$path/dev")"
    }
    inquiry() {
        sg_inq --export $2 /dev/"$disk" | sed -n "s/^$1=//p"
    }
    vendor=$(inquiry SCSI_VENDOR '') model=$(inquiry SCSI_MODEL '')
    serial=$(inquiry SCSI_IDENT_SERIAL --page=sn)
    echo "$address wwn-$(udev ID_WWN_WITH_EXTENSION)"
    echo "$address scsi-$(udev ID_SERIAL)"
    echo "$address scsi-S${vendor}_${model}_$serial"
    columns=VENDOR,MODEL,REV,SERIAL,WWN,ROTA,LOG-SEC,PHY-SEC,DISC-GRAN,RO
    lsblk -d -n -P -o "$columns,MIN-IO,OPT-IO,DISC-MAX" /dev/"$disk" |
        sed "s/^/$address /; s/ *\"/\"/2g"
done
