//! Layered settings of the server: flags override the environment, which overrides the
//! configuration file, which overrides defaults.
//!
//! ```text
//!   command line ─┐
//!   environment  ─┴─ clap, first pass ─► raw words and origins ─┐
//!   file (TOML) ─── known keys only ───► raw words ─────────────┴─ clap, second pass ─► Settings
//! ```
//!
//! [`Settings`] is the only definition. The file's keys are the flags' names, and the flags'
//! parsers read the file's values. `--print-config` writes the flags' help as comments.

use std::ffi::OsString;
use std::fmt::Write as _;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};

use clap::builder::BoolishValueParser;
use clap::error::{ContextKind, ContextValue};
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches};

use super::client::ConnectArgs;
use super::logging;
use crate::engine::{cache_bytes, device_memory_bytes, prefault_bytes};
use crate::human::file_failure;
use crate::memory::parse_bytes;
use crate::service::settings::Settings;
use crate::service::{tenant_memory_bytes, tenant_results_bytes};
use crate::topology::NodeKind;
use crate::{Context, Error, Result};

/// Prefix of Dovetail's environment variables.
const PREFIX: &str = "DOVETAIL_";

/// Settings, with the origin of each.
#[derive(Clone, Debug)]
pub struct Layered {
    pub settings: Settings,
    entries: Vec<Entry>,
}

/// Setting with its value and origin.
#[derive(Clone, Debug)]
struct Entry {
    /// Name of the flag without leading dashes, which is also the key in the file.
    key: String,
    help: String,
    /// Words as given at the origin; empty if not set.
    words: Vec<String>,
    kind: Kind,
    origin: Origin,
    /// True for a setting that only tests use.
    is_hidden: bool,
}

/// Form of a value in TOML.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Text,
    Number,
    Switch,
    List,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Origin {
    Flag,
    Environment(String),
    File(PathBuf),
    Default,
}

/// Makes the switches of [`Settings`] take an optional value. A flag can then turn off a switch
/// that a file turned on (`--insecure=false`), and an environment variable can be `1` or `no`.
pub fn with_valued_switches(command: Command) -> Command {
    command.mut_args(|arg| if is_setting(&arg) { with_valued_switch(arg) } else { arg })
}

fn with_valued_switch(arg: Arg) -> Arg {
    if !matches!(arg.get_action(), ArgAction::SetTrue) {
        return arg;
    }
    arg.action(ArgAction::Set)
        .value_parser(BoolishValueParser::new())
        .num_args(0..=1)
        .require_equals(true)
        .default_missing_value("true")
        .default_value("false")
        .hide_default_value(true)
        .hide_possible_values(true)
        .value_name("BOOL")
}

/// Adds a configuration file below the command line and the environment.
///
/// # Errors
/// [`Error::Invalid`] if the file cannot be read, is not TOML, or has an unknown key or a value
/// that its setting refuses. The message names the file and the key.
pub fn layer(matches: &ArgMatches, file: Option<&Path>) -> Result<Layered> {
    let in_file = file.map(read_file).transpose()?.unwrap_or_default();
    let mut entries = Vec::new();
    for arg in setting_args() {
        let key = key_of(&arg);
        let given = |origin| (raw_words(matches, &arg), origin);
        let (words, origin) = match (matches.value_source(arg.get_id().as_str()), &arg.get_env()) {
            (Some(ValueSource::CommandLine), _) => given(Origin::Flag),
            (Some(ValueSource::EnvVariable), Some(variable)) => {
                given(Origin::Environment(variable.to_string_lossy().into_owned()))
            }
            _ => match (in_file.get(&key), file) {
                (Some(value), Some(file)) => {
                    let context = || format!("configuration file {}: setting {key:?}", file.display());
                    (words_of(value).context(context)?, Origin::File(file.into()))
                }
                _ => given(Origin::Default),
            },
        };
        let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
        entries.push(Entry { kind: kind_of(&arg), key, help, words, origin, is_hidden: arg.is_hide_set() });
    }
    let settings = parse(&entries).map_err(|error| blame(error, &entries))?;
    check_relations(&settings).map_err(|error| attributed(error, &entries))?;
    Ok(Layered { settings, entries })
}

/// Returns the defaults, independent of the environment.
///
/// # Errors
/// None, unless a default is wrong.
pub fn defaults() -> Result<Settings> {
    parse(&[]).map_err(|error| blame(error, &[]))
}

impl Layered {
    /// Replaces the flags in an error by the origins of their values.
    pub fn attributed(&self, error: Error) -> Error {
        attributed(error, &self.entries)
    }

    /// Returns the settings that operators see.
    fn shown(&self) -> impl Iterator<Item = &Entry> {
        self.entries.iter().filter(|entry| !entry.is_hidden)
    }

    /// Renders the settings as a configuration file that gives the same settings again, each with
    /// its help and its origin.
    pub fn to_toml(&self) -> String {
        let mut text = String::from("# Settings of `dovetail serve`. The comment after a value names its source.\n");
        for entry in self.shown() {
            let value = entry.toml_value();
            let (mark, value) = if entry.words.is_empty() { ("# ", "\"\"") } else { ("", value.as_str()) };
            // Writing to a String cannot fail.
            let _ = write!(text, "\n# {}\n{mark}{} = {value}  # {}\n", entry.help, entry.key, entry.origin.describe());
        }
        text
    }

    /// Renders the settings as a JSON object: key to value and origin.
    pub fn to_json(&self) -> serde_json::Value {
        let entry = |entry: &Entry| {
            let word = || entry.words.first().cloned().unwrap_or_default();
            let value = match entry.kind {
                _ if entry.words.is_empty() && entry.kind != Kind::List => serde_json::Value::Null,
                Kind::List => entry.words.clone().into(),
                Kind::Switch => boolish(&word()).into(),
                Kind::Number => word().parse::<u64>().map_or_else(|_| word().into(), Into::into),
                Kind::Text => word().into(),
            };
            (entry.key.clone(), serde_json::json!({ "value": value, "origin": entry.origin.describe() }))
        };
        serde_json::Value::Object(self.shown().map(entry).collect())
    }
}

impl Entry {
    fn toml_value(&self) -> String {
        let quoted = |word: &String| toml::Value::String(word.clone()).to_string();
        match (self.kind, self.words.first()) {
            (Kind::List, _) => format!("[{}]", self.words.iter().map(quoted).collect::<Vec<_>>().join(", ")),
            (Kind::Switch, Some(word)) => boolish(word).to_string(),
            (Kind::Number, Some(word)) => word.clone(),
            (Kind::Text, Some(word)) => quoted(word),
            (_, None) => String::new(),
        }
    }
}

impl Origin {
    /// Returns the name of the setting at its origin: the variable, or the key with the file.
    /// `None` for flags and defaults.
    fn written(&self, key: &str) -> Option<String> {
        match self {
            Self::Environment(variable) => Some(variable.clone()),
            Self::File(path) => Some(format!("{key} in {}", path.display())),
            Self::Flag | Self::Default => None,
        }
    }

    fn describe(&self) -> String {
        match self {
            Self::Flag => "flag".into(),
            Self::Environment(variable) => format!("environment variable {variable}"),
            Self::File(path) => format!("file {}", path.display()),
            Self::Default => "default".into(),
        }
    }
}

/// Returns the definitions of all settings.
fn setting_args() -> Vec<Arg> {
    let mut command = with_valued_switches(Settings::augment_args(Command::new("settings")));
    command.build();
    command.get_arguments().filter(|arg| is_setting(arg)).cloned().collect()
}

/// True if the argument is a setting. The arguments that clap adds, and those without an
/// environment variable, are not.
fn is_setting(arg: &Arg) -> bool {
    arg.get_env().is_some_and(|variable| variable.to_string_lossy().starts_with(PREFIX))
        && arg.get_id().as_str() != super::CONFIG_ID
}

fn key_of(arg: &Arg) -> String {
    arg.get_long().unwrap_or(arg.get_id().as_str()).to_owned()
}

fn kind_of(arg: &Arg) -> Kind {
    let integers = [
        std::any::TypeId::of::<u16>(),
        std::any::TypeId::of::<u32>(),
        std::any::TypeId::of::<u64>(),
        std::any::TypeId::of::<usize>(),
    ];
    let value_type = arg.get_value_parser().type_id();
    if matches!(arg.get_action(), ArgAction::Append) {
        Kind::List
    } else if value_type == std::any::TypeId::of::<bool>() {
        Kind::Switch
    } else if integers.iter().any(|integer| value_type == *integer) {
        Kind::Number
    } else {
        Kind::Text
    }
}

fn raw_words(matches: &ArgMatches, arg: &Arg) -> Vec<String> {
    let raw = matches.get_raw(arg.get_id().as_str());
    raw.map(|words| words.map(|word| word.to_string_lossy().into_owned()).collect()).unwrap_or_default()
}

fn boolish(word: &str) -> bool {
    matches!(word.to_ascii_lowercase().as_str(), "y" | "yes" | "t" | "true" | "on" | "1")
}

/// Reads a configuration file. Refuses keys that are not settings.
fn read_file(path: &Path) -> Result<toml::Table> {
    let context = || format!("configuration file {}", path.display());
    let text =
        std::fs::read_to_string(path).map_err(|error| Error::Invalid(file_failure(path, &error))).context(context)?;
    let table: toml::Table =
        text.parse().map_err(|error: toml::de::Error| Error::Invalid(error.to_string())).context(context)?;
    let known: Vec<String> = setting_args().iter().map(key_of).collect();
    for key in table.keys() {
        if !known.contains(key) {
            return Err(Error::Invalid(format!("unknown setting {key:?}{}", suggestion(key, &known)))).context(context);
        }
    }
    Ok(table)
}

/// Returns `; did you mean "listen"?`, or a hint to the list of settings if no name is close.
fn suggestion(key: &str, known: &[String]) -> String {
    let key = key.replace('_', "-");
    let closeness = |name: &String| strsim::jaro_winkler(name, &key);
    match known.iter().max_by(|a, b| closeness(a).total_cmp(&closeness(b))) {
        Some(name) if closeness(name) > 0.75 => format!("; did you mean {name:?}?"),
        _ => "; `dovetail serve --print-config` lists all settings".into(),
    }
}

/// Warns of environment variables with our prefix that neither the server nor a client reads. Names
/// for tests and benchmarks are left out, and so are those that Kubernetes makes of a service.
pub fn unknown_variables() -> Vec<String> {
    let clients = ConnectArgs::augment_args(Command::new("client"));
    let known = setting_args().into_iter().chain(clients.get_arguments().cloned());
    let known = known.filter_map(|arg| Some(arg.get_env()?.to_string_lossy().into_owned()));
    let known: Vec<String> = known.chain([format!("{PREFIX}{}", super::CONFIG_ID.to_uppercase())]).collect();
    let given = std::env::vars_os().map(|(name, value)| [name, value].map(|text| text.to_string_lossy().into_owned()));
    let unknown = given.filter(|[name, value]| {
        name.starts_with(PREFIX) && !known.contains(name) && !is_of_other_programs(name, value)
    });
    unknown.map(|[name, _]| unknown_variable(&name, &known)).collect()
}

fn unknown_variable(name: &str, known: &[String]) -> String {
    let closeness = |known: &str| strsim::jaro_winkler(&known[PREFIX.len()..], &name[PREFIX.len()..]);
    let closest = known.iter().max_by(|a, b| closeness(a).total_cmp(&closeness(b)));
    let hint = match closest.filter(|closest| closeness(closest) > 0.9) {
        Some(closest) => format!("did you mean {closest}?"),
        None => "`dovetail serve --help` lists the variables".into(),
    };
    format!("environment variable {name} is not a setting and is ignored; {hint}")
}

/// True for a variable that other programs read or make, although it has our prefix.
fn is_of_other_programs(name: &str, value: &str) -> bool {
    let name = &name[PREFIX.len()..];
    // Of the build, the tests and the benchmarks, and of tools that watch a GPU.
    let ours = [
        "BIN",
        "BLESS",
        "CASE",
        "GPU_OBSERVER",
        "LONG",
        "ORACLE_SECONDS",
        "OTHER_CLIENTS",
        "RECORD",
        "RESULTS",
        "SEED",
    ];
    let is_ours = ours.contains(&name) || name.starts_with("TEST_") || name.starts_with("CUDA");
    // For a service "dovetail-a", Kubernetes sets DOVETAIL_A_SERVICE_HOST, DOVETAIL_A_PORT and
    // more.
    let of_service = ["_SERVICE_HOST", "_SERVICE_PORT", "_PORT_"].iter().any(|part| format!("_{name}").contains(part));
    let is_link = format!("_{name}").ends_with("_PORT") && value.contains("://");
    is_ours || of_service || is_link
}

/// Converts a value of the file to the words that a flag would take.
fn words_of(value: &toml::Value) -> Result<Vec<String>> {
    Ok(match value {
        toml::Value::String(text) => vec![text.clone()],
        toml::Value::Integer(number) => vec![number.to_string()],
        toml::Value::Boolean(switch) => vec![switch.to_string()],
        toml::Value::Array(values) => {
            values.iter().map(words_of).collect::<Result<Vec<_>>>()?.into_iter().flatten().collect()
        }
        other => {
            return Err(Error::Invalid(format!(
                "a {} cannot be a setting; write a string, an integer, true, false, or a list of strings",
                other.type_str()
            )));
        }
    })
}

/// Parses the words of every setting that is not a default, with the flags' own parsers.
fn parse(entries: &[Entry]) -> Result<Settings, clap::Error> {
    let no_environment = |arg: Arg| arg.env(None::<&'static str>);
    let command = with_valued_switches(Settings::augment_args(Command::new("serve"))).mut_args(no_environment);
    let words = entries.iter().filter(|entry| entry.origin != Origin::Default);
    let flags = words.flat_map(|entry| entry.words.iter().map(move |word| format!("--{}={word}", entry.key)));
    let line = std::iter::once("serve".to_owned()).chain(flags).map(OsString::from);
    Settings::from_arg_matches(&command.try_get_matches_from(line)?)
}

/// Attributes an error of clap to the value's origin. Flags and environment have passed clap once,
/// so the origin is the file.
fn blame(mut error: clap::Error, entries: &[Entry]) -> Error {
    let flag = flag_of(&error);
    let entry = entries.iter().find(|entry| flag.as_deref() == Some(&*entry.key));
    if let Some(written) = entry.and_then(|entry| entry.origin.written(&entry.key)) {
        error.insert(ContextKind::InvalidArg, ContextValue::String(written));
        return Error::Invalid(sentence(&error));
    }
    let file = entries.iter().find_map(|entry| match &entry.origin {
        Origin::File(path) => Some(format!("configuration file {}", path.display())),
        _ => None,
    });
    let error = Error::Invalid(sentence(&error));
    file.map_or(error.clone(), |file| error.context(file))
}

/// Returns the name of the flag whose value clap refuses, without leading dashes.
pub fn flag_of(error: &clap::Error) -> Option<String> {
    let Some(ContextValue::String(argument)) = error.get(ContextKind::InvalidArg) else { return None };
    let flag = argument.strip_prefix("--")?;
    Some(flag.split([' ', '=', '[']).next().unwrap_or(flag).to_owned())
}

/// Replaces each flag in an error with the origin of its value, if that is the environment or the
/// file.
fn attributed(mut error: Error, entries: &[Entry]) -> Error {
    for entry in entries {
        let Some(written) = entry.origin.written(&entry.key) else { continue };
        let (flag, message) = (format!("--{}", entry.key), error.message());
        let mut said = String::with_capacity(message.len());
        let mut rest = message;
        while let Some((before, behind)) = rest.split_once(&flag) {
            // --tls-cert is no part of --tls-cert-file.
            let is_whole = !behind.starts_with(|c: char| c.is_alphanumeric() || c == '-');
            said.extend([before, if is_whole { &written } else { &flag }]);
            rest = behind;
        }
        said.push_str(rest);
        error = error.with_message(said);
    }
    error
}

/// Returns clap's message in one line, without its usage hints, which are about the command line.
pub fn sentence(error: &clap::Error) -> String {
    let text = error.to_string();
    let said =
        text.lines().map(str::trim).take_while(|line| !line.starts_with("Usage") && !line.starts_with("For more"));
    let sentence = said.filter(|line| !line.is_empty()).collect::<Vec<_>>().join(" ");
    sentence.trim_start_matches("error: ").to_owned()
}

/// Checks relations that no single flag's parser can see: settings that need each other, and sizes
/// kept as text.
fn check_relations(settings: &Settings) -> Result<()> {
    let refuse = |sentence: &str| Err(Error::Invalid(sentence.into()));
    match (&settings.tls_cert, &settings.tls_key) {
        (Some(_), None) => return refuse("--tls-cert needs --tls-key, the private key of that certificate"),
        (None, Some(_)) => return refuse("--tls-key needs --tls-cert, the certificate chain of that key"),
        _ => {}
    }
    if settings.tls_client_ca.is_some() && settings.tls_cert.is_none() {
        return refuse(
            "--tls-client-ca needs --tls-cert and --tls-key, because clients present certificates over TLS only",
        );
    }
    let size = |key: &str, text: &str| parse_bytes(text).map(drop).context(|| format!("--{key}"));
    if !settings.host_memory.trim().ends_with('%') {
        size("host-memory", &settings.host_memory)?;
    } else if !share_is_sound(&settings.host_memory) {
        return refuse("--host-memory as a percentage must be above 0% and at most 100%, such as 60%");
    }
    prefault_bytes(&settings.prefault, u64::MAX, 0)?;
    match settings.call_memory.trim() {
        "auto" => (),
        share if share.ends_with('%') && share_is_sound(share) => (),
        share if share.ends_with('%') => {
            return refuse("--call-memory as a percentage must be above 0% and at most 100%, such as 6%");
        }
        text => size("call-memory", text)?,
    }
    // Check the whole text, whichever kinds of devices exist.
    device_memory_bytes(&settings.device_memory, NodeKind::Host)?;
    cache_bytes(&settings.device_cache, u64::MAX)?;
    size("message-limit", &settings.message_limit)?;
    tenant_memory_bytes(&settings.tenant_memory)?;
    tenant_results_bytes(&settings.tenant_results, None)?;
    logging::filter(&settings.log)?;
    if settings.admin_listen == "off" {
        return Ok(());
    }
    match settings.admin_listen.parse() {
        Ok(admin) if share_a_port(settings.listen, admin) => Err(Error::Invalid(format!(
            "--listen {} and --admin-listen {admin} use the same port; change one of them, or set --admin-listen to \
             \"off\"",
            settings.listen
        ))),
        Ok(_) => Ok(()),
        Err(_) => Err(Error::Invalid(format!(
            "--admin-listen {:?} is not valid; write an IP address and a port, such as 127.0.0.1:8816, or \"off\"",
            settings.admin_listen
        ))),
    }
}

/// True if two addresses cannot both be listened on: they are equal, or one stands for all
/// addresses of the host, including the other. Port 0 stands for a free port, so it never collides.
fn share_a_port(a: SocketAddr, b: SocketAddr) -> bool {
    // The address [::] also receives IPv4.
    let covers = |a: IpAddr, b: IpAddr| a == b || (a.is_unspecified() && (a.is_ipv6() || b.is_ipv4()));
    a.port() == b.port() && a.port() != 0 && (covers(a.ip(), b.ip()) || covers(b.ip(), a.ip()))
}

fn share_is_sound(text: &str) -> bool {
    let number = text.trim().trim_end_matches('%').trim().parse::<f64>();
    number.is_ok_and(|share| share > 0.0 && share <= 100.0)
}

#[cfg(test)]
mod tests;
