//! The files of a disk that is to be added, opened with the rights of this user and passed to the
//! daemon.

use std::fs::File;

use anyhow::Result;
use ringhaul::control_socket::descriptors::OpenedFiles;
use ringhaul::spec::{ExportSettings, ExportSpec, UnitSpec};
use serde_json::{Value, json};

use super::connection::{Connection, Refusal};

/// Calls a method that adds disks, with the files of these. A daemon that may open the rest does so
/// by itself; otherwise its refusal says why this program could not.
pub(super) fn add(
    daemon: &mut Connection,
    method: &str,
    params: &Value,
) -> Result<Result<Value, Refusal>> {
    let OpenedFiles { files, left_out } = open(daemon, method, params);
    let (names, files): (Vec<_>, Vec<File>) = files.into_iter().unzip();
    let mut with_names = params.clone();
    if let Some(params) = with_names.as_object_mut().filter(|_| !names.is_empty()) {
        params.insert("descriptors".to_owned(), json!(names));
    }
    let mut answer = daemon.call_with(method, &with_names, &files)?;
    // The locks of the daemon end with the last descriptor.
    drop(files);
    if let Err(refusal) = &answer
        && refusal.message.starts_with("unknown field `descriptors`")
    {
        // An earlier version opens all files by itself.
        answer = daemon.call(method, params)?;
    }
    Ok(answer.map_err(|refusal| match left_out {
        Some(error) => {
            let user = rustix::process::geteuid().as_raw();
            let Refusal { code, message } = refusal;
            let message = format!("{message}; ctl, as user {user}, passed no open file: {error:#}");
            Refusal { code, message }
        }
        None => refusal,
    }))
}

/// Opens the files of the disks in a call.
fn open(daemon: &mut Connection, method: &str, params: &Value) -> OpenedFiles {
    let is_foreign = daemon.user() != Some(rustix::process::geteuid().as_raw());
    // The daemon explains parameters that are wrong.
    if method == "export.add" {
        let spec = serde_json::from_value::<ExportSpec>(params.clone());
        return spec.map(|spec| OpenedFiles::of_export(&spec, is_foreign)).unwrap_or_default();
    }
    let Ok(unit) = serde_json::from_value::<UnitSpec>(params["unit"].clone()) else {
        return OpenedFiles::default();
    };
    let shown = daemon.call("export.show", &json!({ "export": params["export"] }));
    let Ok(Ok(shown)) = shown else { return OpenedFiles::default() };
    let is_on = |key: &str| shown[key].as_bool().unwrap_or(false);
    let export = ExportSettings {
        read_only: is_on("read-only"),
        no_lock: is_on("no-lock"),
        ..ExportSettings::default()
    };
    OpenedFiles::of_unit(&unit, &export, is_foreign)
}
