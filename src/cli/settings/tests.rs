use super::*;

/// Layers settings from flags and a file, without the environment, which tests share.
fn layered(flags: &[&str], file: Option<&str>) -> Result<Layered> {
    let folder = tempfile::tempdir().unwrap();
    let path = file.map(|text| {
        let path = folder.path().join("dovetail.toml");
        std::fs::write(&path, text).unwrap();
        path
    });
    let command = with_valued_switches(Settings::augment_args(Command::new("serve")));
    let command = command.mut_args(|arg| if is_from_environment(&arg) { arg.env(None::<&'static str>) } else { arg });
    let matches = command.try_get_matches_from(std::iter::once(&"serve").chain(flags)).unwrap();
    layer(&matches, path.as_deref())
}

/// True if the environment sets the argument's variable.
fn is_from_environment(arg: &Arg) -> bool {
    arg.get_env().is_some_and(|variable| std::env::var_os(variable).is_some())
}

fn origin(layered: &Layered, key: &str) -> Origin {
    layered.entries.iter().find(|entry| entry.key == key).unwrap().origin.clone()
}

#[test]
fn defaults_are_sound() {
    let layered = layered(&[], None).unwrap();
    assert_eq!(layered.settings.listen.port(), 8815);
    assert!(layered.entries.iter().all(|entry| entry.origin == Origin::Default));
    assert_eq!(format!("{:?}", layered.settings), format!("{:?}", defaults().unwrap()));
}

#[test]
fn a_flag_overrides_the_file_and_the_file_overrides_the_default() {
    let file = "stream-limit = 7\nqueue-limit = 9\ninsecure = true\n";
    let layered = layered(&["--stream-limit", "8"], Some(file)).unwrap();
    assert_eq!(layered.settings.stream_limit, 8);
    assert_eq!(layered.settings.queue_limit, 9);
    assert!(layered.settings.insecure);
    assert_eq!(origin(&layered, "stream-limit"), Origin::Flag);
    assert!(matches!(origin(&layered, "queue-limit"), Origin::File(_)));
    assert_eq!(origin(&layered, "endpoints"), Origin::Default);
}

#[test]
fn a_flag_can_turn_off_what_the_file_turned_on() {
    let file = Some("insecure = true");
    assert!(!layered(&["--insecure=false"], file).unwrap().settings.insecure);
    assert!(layered(&["--insecure"], None).unwrap().settings.insecure);
    assert!(layered(&["--insecure=yes"], None).unwrap().settings.insecure);
}

#[test]
fn the_file_accepts_strings_numbers_switches_and_lists() {
    let file = r#"
        listen = "127.0.0.1:0"
        host-memory = "1GiB"
        endpoints = 3
        public-locations = ["grpc://a:1", "grpc://b:2"]
        log = "info,dovetail::scheduler=debug"
    "#;
    let settings = layered(&[], Some(file)).unwrap().settings;
    assert_eq!((settings.listen.port(), settings.endpoints), (0, Some(3)));
    assert_eq!(settings.public_locations, ["grpc://a:1", "grpc://b:2"]);
    assert_eq!(settings.log, "info,dovetail::scheduler=debug");
}

#[test]
fn errors_in_the_file_are_named() {
    let cases = [
        ("lsiten = \"127.0.0.1:1\"", "did you mean \"listen\"?"),
        ("host_memory = \"1GiB\"", "did you mean \"host-memory\"?"),
        ("xyzzy = 1", "--print-config"),
        ("listen = \"nowhere\"", "invalid value 'nowhere' for 'listen in FILE'"),
        ("endpoints = -1", "invalid value '-1' for 'endpoints in FILE'"),
        ("insecure = \"maybe\"", "invalid value 'maybe' for 'insecure in FILE'"),
        ("log-format = \"xml\"", "for 'log-format in FILE' [possible values: text, json]"),
        ("listen = 1979-05-27", "\"listen\": a datetime cannot be a setting"),
        ("[listen]\nport = 1", "a table cannot be a setting"),
        ("listen =", "configuration file"),
        ("host-memory = \"lots\"", "host-memory in FILE: \"lots\" is not a size"),
        ("host-memory = \"0%\"", "host-memory in FILE as a percentage must be above 0%"),
        ("device-cache = \"4\"", "device-cache in FILE: \"4\" is 4 B"),
        ("tls-cert = \"c.pem\"", "tls-cert in FILE needs --tls-key"),
        ("tls-client-ca = \"c.pem\"", "tls-client-ca in FILE needs --tls-cert and --tls-key"),
        ("admin-listen = \"on\"", "admin-listen in FILE \"on\" is not valid; write an IP address"),
        ("log = \"verbose\"", "log in FILE \"verbose\": \"verbose\" is not a level"),
        ("tenant-memory = 5", "a number without a unit is bytes"),
        (
            "admin-listen = \"127.0.0.1:8815\"",
            "--listen 127.0.0.1:8815 and admin-listen in FILE 127.0.0.1:8815 use the same port",
        ),
    ];
    for (file, expected) in cases {
        let error = layered(&[], Some(file)).unwrap_err();
        assert!(matches!(error, Error::Invalid(_)), "{file}: {error:?}");
        // The folder is a new one each time.
        let message = error.message();
        let message = match message.find("/").zip(message.find("dovetail.toml")) {
            Some((from, to)) => format!("{}FILE{}", &message[..from], &message[to + "dovetail.toml".len()..]),
            None => message.to_owned(),
        };
        assert!(message.contains(expected), "{file}: {error}");
        assert!(!error.message().contains("Usage"), "{file}: {error}");
    }
}

#[test]
fn an_error_names_the_source_of_a_setting_and_leaves_flags_unchanged() {
    let entry = |key: &str, origin: Origin| Entry {
        key: key.into(),
        help: String::new(),
        words: vec!["x".into()],
        kind: Kind::Text,
        origin,
        is_hidden: false,
    };
    let entries = [
        entry("tls", Origin::File("/etc/other.toml".into())),
        entry("tls-cert", Origin::File("/etc/dovetail.toml".into())),
        entry("devices", Origin::Environment("DOVETAIL_DEVICES".into())),
        entry("tls-key", Origin::Flag),
        entry("topology", Origin::Default),
    ];
    let error = Error::Unavailable("--tls-cert and --tls-key; --devices \"x\" and --topology (--tls-cert)".into());
    let expected = "tls-cert in /etc/dovetail.toml and --tls-key; DOVETAIL_DEVICES \"x\" and --topology (tls-cert in /etc/dovetail.toml)";
    assert_eq!(attributed(error, &entries), Error::Unavailable(expected.into()));
}

#[test]
fn equal_ports_conflict_if_one_address_includes_the_other() {
    let same = |a: &str, b: &str| share_a_port(a.parse().unwrap(), b.parse().unwrap());
    for (a, b) in [
        ("127.0.0.1:1", "127.0.0.1:1"),
        ("0.0.0.0:1", "127.0.0.1:1"),
        ("[::]:1", "10.0.0.1:1"),
        ("[::1]:1", "[::]:1"),
        ("[::]:1", "0.0.0.0:1"),
    ] {
        assert!(same(a, b) && same(b, a), "{a} and {b}");
    }
    for (a, b) in [
        ("127.0.0.1:1", "127.0.0.1:2"),
        ("127.0.0.1:0", "127.0.0.1:0"),
        ("127.0.0.1:1", "10.0.0.1:1"),
        ("127.0.0.1:1", "[::1]:1"),
        ("0.0.0.0:1", "[::1]:1"),
    ] {
        assert!(!same(a, b) && !same(b, a), "{a} and {b}");
    }
}

#[test]
fn tls_settings_may_come_from_different_sources() {
    let layered = layered(&["--tls-key", "key.pem"], Some("tls-cert = \"cert.pem\"")).unwrap();
    assert_eq!(layered.settings.tls_cert, Some(PathBuf::from("cert.pem")));
}

#[test]
fn a_missing_file_is_named() {
    let matches = Settings::augment_args(Command::new("serve")).try_get_matches_from(["serve"]).unwrap();
    let error = layer(&matches, Some(Path::new("/nowhere/dovetail.toml"))).unwrap_err();
    assert!(error.message().contains("/nowhere/dovetail.toml"), "{error}");
}

#[test]
fn the_printed_configuration_parses_to_the_same_settings() {
    let flags =
        ["--listen=127.0.0.1:0", "--insecure", "--public-locations=grpc://a:1,grpc://b:2", "--rates-file=a \"b\""];
    let first = layered(&flags, None).unwrap();
    let text = first.to_toml();
    let again = layered(&[], Some(&text)).unwrap();
    assert_eq!(format!("{:?}", again.settings), format!("{:?}", first.settings), "{text}");
    for entry in first.shown() {
        assert!(!entry.help.is_empty(), "setting {} is not documented", entry.key);
        assert!(text.contains(&entry.help), "{} is printed without its help", entry.key);
    }
}

#[test]
fn a_setting_for_tests_takes_effect_and_is_not_shown() {
    let layered = layered(&["--test-fault", "/f", "--test-gpus-of-one", "2"], None).unwrap();
    assert_eq!(layered.settings.test_fault, Some("/f".into()));
    assert_eq!(layered.settings.test_gpus_of_one, Some(2));
    assert!(!layered.to_toml().contains("test-") && !layered.to_json().to_string().contains("test-"));
}

#[test]
fn variables_of_other_programs_are_told_from_unknown_ones() {
    for (name, value) in [
        ("DOVETAIL_SERVICE_HOST", "10.0.0.1"),
        ("DOVETAIL_SERVICE_PORT_FLIGHT", "8815"),
        ("DOVETAIL_PORT", "tcp://10.0.0.1:8815"),
        ("DOVETAIL_PORT_8815_TCP_ADDR", "10.0.0.1"),
        ("DOVETAIL_EU_SERVICE_HOST", "10.0.0.1"),
        ("DOVETAIL_EU_PORT", "tcp://10.0.0.1:8815"),
        ("DOVETAIL_TEST_DEVICE", "cuda"),
        ("DOVETAIL_SEED", "1"),
    ] {
        assert!(is_of_other_programs(name, value), "{name}");
    }
    for (name, value) in [("DOVETAIL_PORT", "8815"), ("DOVETAIL_MEMORY", "1GiB"), ("DOVETAIL_TLS_CERTS", "a.pem")] {
        assert!(!is_of_other_programs(name, value), "{name}");
    }
    let known = ["DOVETAIL_TLS_CERT".to_owned()];
    assert!(unknown_variable("DOVETAIL_TLS_CERTS", &known).ends_with("did you mean DOVETAIL_TLS_CERT?"));
    assert!(unknown_variable("DOVETAIL_WORKERS", &known).contains("lists the variables"));
}
