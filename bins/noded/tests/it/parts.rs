//! A node of parts that are not shipped: one part is one file and one line, `.with(NtpPart)`.

use std::convert::Infallible;
use std::fmt;
use std::io::{Read as _, Write as _};
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;
use std::time::Duration;

use hyper_util::rt::TokioIo;
use nodekeel_localstorage::tree::LayoutDir;
use nodekeel_node::client::{self, NodeClient};
use nodekeel_node::config::{ConfigSection, ConfigViolation, NodedConfig};
use nodekeel_node::health::{HealthCondition, NodeSnapshot};
use nodekeel_node::node::{BuildError, ExtraRunnable, NodeBuilder, NodeHandle, StartError};
use nodekeel_node::part::{
    DependencyEntry, NodePreparation, Part, PlannedRunnable, PlannedService, PrepareError, PreparedRunnable,
};
use nodekeel_node::plan::PartPlanner;
use nodekeel_node::v1::{EventsRequest, HealthRequest, HealthResponse, TreeRequest};
use nodekeel_supervisor::process::{Process, Readiness};
use nodekeel_supervisor::{Backoff, ChildPolicy, ChildSpec, Context, Failure, LimitAction, RestartLimit};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::registry::Registry;
use serde::Deserialize;
use testbed::ScratchDir;
use tokio::net::UnixStream;
use tokio::sync::mpsc;
use tokio::time::timeout;
use tonic::body::Body;
use tonic::codegen::{Service, http};
use tonic::server::NamedService;
use tonic::transport::Endpoint;
use tonic::{Request, Response, Status};
use tonic_prost::ProstCodec;

use crate::harness::{NO_DAEMONS, TEST_TIMEOUT, service_config};

nodekeel_localstorage::layout! {
    /// On the data volume: the part of ntp.
    struct NtpLayout {
        /// Its drift file.
        ntp: LayoutDir = "ntp", 0o700;
    }
}

/// `[ntp]`
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct NtpConfig {
    server: String,
    #[serde(default)]
    port: Option<u16>,
}

struct NtpPart;

impl Part for NtpPart {
    fn name(&self) -> &str {
        "ntp"
    }

    fn sections(&self) -> Vec<ConfigSection> {
        vec![ConfigSection::new::<NtpConfig>("ntp")]
    }

    fn check(&self, config: &NodedConfig) -> Result<(), ConfigViolation> {
        match config.section::<NtpConfig>("ntp") {
            Some(ntp) if ntp.server.is_empty() => {
                Err(ConfigViolation::new("ntp.server", "must name a server"))
            }
            _ => Ok(()),
        }
    }

    fn plan(&self, planner: &mut PartPlanner<'_>) {
        let Some(config) = planner.config().section::<NtpConfig>("ntp").cloned() else { return };
        let (binary, skipped) = planner.find_program("ntp", Some("/bin/sh".as_ref()), "install a shell");
        let directory = planner.plan_layout::<NtpLayout>().unwrap().ntp.path().to_owned();
        let plan = NtpPlan { binary, directory, config };
        planner.add(PlannedService::new("root.ntp", plan).layout::<NtpLayout>().skip(skipped));
    }
}

#[derive(Debug)]
struct NtpPlan {
    binary: PathBuf,
    directory: PathBuf,
    config: NtpConfig,
}

impl fmt::Display for NtpPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the time of {}, drift in {}", self.config.server, self.directory.display())
    }
}

impl PlannedRunnable for NtpPlan {
    fn prepare(&self, node: &mut NodePreparation<'_>) -> Result<PreparedRunnable, PrepareError> {
        node.extensions().insert(self.config.clone());
        let binary = self.binary.clone();
        Ok(node.on_volume(move |volume| {
            let placed: NtpLayout = volume.create_layout()?;
            let script = format!("echo 1.5 > {}/drift && exec sleep 1000", placed.ntp.path().display());
            let process = Process::new(&binary).args(["-c", &script]).ready_when(Readiness::on_start());
            Ok(process.envs([("PATH", "/usr/bin:/bin")]))
        }))
    }
}

/// The builder of a node with `ntp` and without daemons.
fn ntp_node(config: &str) -> (ScratchDir, NodeBuilder) {
    let scratch = ScratchDir::new().unwrap();
    let text = format!("{NO_DAEMONS}{config}");
    let builder = NodeHandle::builder("test.toml", text).data(scratch.path().join("data")).with(NtpPart);
    (scratch, builder)
}

const NTP: &str = "[ntp]\nserver = \"time.example\"\n";

async fn connect(node: &NodeHandle) -> NodeClient {
    client::connect(node.control_socket()).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_part_of_the_program_is_planned_run_and_shown_like_a_shipped_one() {
    let (scratch, builder) = ntp_node(NTP);
    let shown = builder.plan().unwrap().to_string();
    assert!(shown.contains("root.ntp                 the time of time.example, drift in "), "{shown}");
    assert!(!scratch.path().join("data").exists(), "planning changes nothing");

    let (scratch, builder) =
        ntp_node(&format!("{NTP}{}", service_config("a", "sleep 1000", "depends_on = [\"ntp\"]")));
    let node = builder.start().unwrap();
    timeout(TEST_TIMEOUT, node.wait_ready("root.service.a")).await.unwrap();
    let tree = connect(&node).await.tree(TreeRequest {}).await.unwrap().into_inner();
    let names: Vec<_> = tree.nodes.iter().map(|node| node.dn.as_str()).collect();
    assert_eq!(names, ["root", "root.control", "root.storage", "root.ntp", "root.service", "root.service.a"]);
    assert!(scratch.path().join("data/data/ntp").is_dir());
    assert_eq!(node.extension::<NtpConfig>().unwrap().server, "time.example");
    node.shutdown().await;
}

/// A part that adds what it knows to the node's health and metrics.
struct FanPart(Arc<AtomicBool>);

impl Part for FanPart {
    fn name(&self) -> &str {
        "fan"
    }

    fn plan(&self, planner: &mut PartPlanner<'_>) {
        planner.add(PlannedService::new("root.fan", FanPlan(Arc::clone(&self.0))));
    }
}

#[derive(Debug)]
struct FanPlan(Arc<AtomicBool>);

impl fmt::Display for FanPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a fan")
    }
}

impl PlannedRunnable for FanPlan {
    fn prepare(&self, node: &mut NodePreparation<'_>) -> Result<PreparedRunnable, PrepareError> {
        let is_stuck = Arc::clone(&self.0);
        node.health_sources().add("fan", move |_: &NodeSnapshot| {
            let stuck = HealthCondition::problem("fan 1", "does not turn").waiting_for("its owner");
            is_stuck.load(Ordering::Relaxed).then(|| stuck.hint("replace it")).into_iter().collect()
        });
        let (mut registry, turns) = (Registry::default(), Counter::<u64>::default());
        registry.register("fan_turns", "Turns of the fan", turns.clone());
        turns.inc_by(7);
        node.metrics().add("fan", registry);
        Ok(PreparedRunnable::new(|ctx: Context| async move {
            ctx.signal_ready()?;
            ctx.until_canceled().await
        }))
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_part_of_the_program_answers_health_and_serves_its_metrics_like_a_shipped_one() {
    let is_stuck = Arc::new(AtomicBool::new(false));
    let scratch = ScratchDir::new().unwrap();
    let socket = scratch.path().join("metrics.sock");
    let config = format!("[health]\nmin_free_percent = 0\n[metrics]\naddress = {socket:?}\n");
    let (_scratch, builder) = ntp_node(&config);
    let node = builder.with(FanPart(Arc::clone(&is_stuck))).start().unwrap();
    for dn in ["root", "root.fan", "root.metrics", "root.storage"] {
        timeout(TEST_TIMEOUT, node.wait_ready(dn)).await.unwrap();
    }
    let mut client = connect(&node).await;
    let health = client.health(HealthRequest {}).await.unwrap().into_inner();
    assert!(health.healthy, "{health:?}");
    is_stuck.store(true, Ordering::Relaxed);
    let health = client.health(HealthRequest {}).await.unwrap().into_inner();
    assert!(!health.healthy, "{health:?}");
    let found = &health.conditions[0];
    let shown = [&found.part, &found.object, &found.problem, &found.waiting_for, &found.hint];
    assert_eq!(shown, ["fan", "fan 1", "does not turn", "its owner", "replace it"]);
    let mut watch = client.watch_health(HealthRequest {}).await.unwrap().into_inner();
    let is_healthy = async |watch: &mut tonic::Streaming<HealthResponse>| {
        timeout(TEST_TIMEOUT, watch.message()).await.unwrap().unwrap().unwrap().healthy
    };
    assert!(!is_healthy(&mut watch).await);
    is_stuck.store(false, Ordering::Relaxed);
    while !is_healthy(&mut watch).await {}
    let text = tokio::task::spawn_blocking(move || {
        let mut stream = std::os::unix::net::UnixStream::connect(socket).unwrap();
        stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: node\r\nConnection: close\r\n\r\n").unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        text
    });
    let text = text.await.unwrap();
    assert!(text.contains("\nfan_turns_total 7\n") && text.contains("\nnodekeel_healthy 1\n"), "{text}");
    node.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_part_whose_child_exceeds_its_restart_limit_names_the_child() {
    let parent = ExtraRunnable::new("parent", |ctx: Context| async move {
        let mut policy = ChildPolicy { backoff: Backoff::NONE, ..ChildPolicy::default() };
        let (restarts, period, action) = (2, Duration::from_secs(60), LimitAction::FailParent);
        policy.restart_limit = Some(RestartLimit { restarts, period, action });
        let fails = |_: Context| async { Err::<(), Failure>(Failure::new("no luck")) };
        ctx.run_group([ChildSpec::new("child", fails).policy(policy)])?;
        ctx.until_canceled().await
    });
    let (_scratch, builder) = ntp_node("");
    let node = builder.with(parent).start().unwrap();
    let mut client = connect(&node).await;
    let mut watch = client.watch_health(HealthRequest {}).await.unwrap().into_inner();
    let found = timeout(TEST_TIMEOUT, async {
        loop {
            let health = watch.message().await.unwrap().unwrap();
            let mut conditions = health.conditions.into_iter();
            if let Some(found) = conditions
                .find(|found| found.object == "root.parent" && found.problem.contains("crash-loops"))
            {
                return found;
            }
        }
    });
    let found = found.await.unwrap();
    let says = "the last one: child root.parent.child failed more than 2 times within 60s";
    assert!(found.problem.ends_with(says), "{found:?}");
    node.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_part_waits_for_a_service_and_a_service_for_a_runnable_of_the_program() {
    let services = service_config("clock", "sleep 1000", "depends_on = [\"lease\"]");
    let (_scratch, builder) = ntp_node(&format!("{NTP}depends_on = [\"clock\"]\n{services}"));
    let lease = ExtraRunnable::new("lease", |ctx: Context| async move {
        ctx.signal_ready()?;
        ctx.until_canceled().await
    });
    let node = builder.with(lease).start().unwrap();
    timeout(TEST_TIMEOUT, node.wait_ready("root.ntp")).await.unwrap();
    let mut events = connect(&node)
        .await
        .events(EventsRequest { backlog: None, follow: false })
        .await
        .unwrap()
        .into_inner();
    let events = events.message().await.unwrap().unwrap().events;
    let at = |dn: &str, change: &str| {
        events
            .iter()
            .position(|event| event.dn == dn && event.change == change)
            .unwrap_or_else(|| panic!("{dn}"))
    };
    assert!(at("root.lease", "ready") < at("root.service.clock", "ready"));
    assert!(at("root.service.clock", "ready") < at("root.ntp", "ready"));
    assert!(!events.iter().any(|event| event.change == "exited"), "nothing has failed: {events:#?}");
    node.shutdown().await;
}

/// A gRPC service that answers an empty message.
#[derive(Clone)]
struct PingService;

impl NamedService for PingService {
    const NAME: &'static str = "example.Ping";
}

impl Service<http::Request<Body>> for PingService {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut std::task::Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let answer = tower::service_fn(async |_: Request<()>| Ok::<_, Status>(Response::new(())));
        let codec = ProstCodec::<(), ()>::default();
        Box::pin(async move { Ok(tonic::server::Grpc::new(codec).unary(answer, request).await) })
    }
}

/// A part that adds a call to the control API.
struct PingPart;

impl Part for PingPart {
    fn name(&self) -> &str {
        "ping"
    }

    fn plan(&self, planner: &mut PartPlanner<'_>) {
        planner.add(PlannedService::new("root.ping", PingPlan));
    }
}

#[derive(Debug)]
struct PingPlan;

impl fmt::Display for PingPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("answers")
    }
}

impl PlannedRunnable for PingPlan {
    fn prepare(&self, node: &mut NodePreparation<'_>) -> Result<PreparedRunnable, PrepareError> {
        node.control_services().add_service(PingService)?;
        Ok(PreparedRunnable::new(|ctx: Context| async move { ctx.until_canceled().await }))
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_part_adds_calls_to_the_control_api() {
    let (_scratch, builder) = ntp_node("");
    let node = builder.with(PingPart).start().unwrap();
    timeout(TEST_TIMEOUT, node.wait_ready("root.control")).await.unwrap();
    let socket = node.control_socket().to_owned();
    let connector = tower::service_fn(move |_| {
        let socket = socket.clone();
        async move { Ok::<_, std::io::Error>(TokioIo::new(UnixStream::connect(socket).await?)) }
    });
    let channel = Endpoint::from_static("http://node").connect_with_connector(connector).await.unwrap();
    let mut client = tonic::client::Grpc::new(channel);
    client.ready().await.unwrap();
    let path = http::uri::PathAndQuery::from_static("/example.Ping/Ping");
    let codec = ProstCodec::<(), ()>::default();
    timeout(TEST_TIMEOUT, client.unary(Request::new(()), path, codec)).await.unwrap().unwrap();
    connect(&node).await.tree(TreeRequest {}).await.unwrap();
    node.shutdown().await;
}

/// A part that plans these DNs.
struct DnPart {
    name: &'static str,
    dns: &'static [&'static str],
    sections: Vec<ConfigSection>,
}

impl DnPart {
    fn new(name: &'static str, dns: &'static [&'static str]) -> Self {
        Self { name, dns, sections: Vec::new() }
    }

    fn section(self, name: &str) -> Self {
        Self { sections: vec![ConfigSection::new::<toml::Table>(name)], ..self }
    }
}

impl Part for DnPart {
    fn name(&self) -> &str {
        self.name
    }

    fn sections(&self) -> Vec<ConfigSection> {
        self.sections.clone()
    }

    fn plan(&self, planner: &mut PartPlanner<'_>) {
        for dn in self.dns {
            let run = |ctx: Context| async move { ctx.until_canceled().await };
            planner.add(PlannedService::from_runnable(*dn, "a runnable", run));
        }
    }
}

#[test]
fn a_part_of_several_runnables_waits_and_is_waited_for_as_a_whole() {
    let service = service_config("s", "true", "depends_on = [\"pair\"]");
    let (_scratch, builder) = ntp_node(&format!("{NTP}[pair]\ndepends_on = [\"ntp\"]\n{service}"));
    let pair = DnPart::new("pair", &["root.pair.a", "root.pair.b"]).section("pair");
    let plan = builder.with(pair).plan().unwrap();
    let waits_for = |dn: &str| &plan.services.iter().find(|planned| planned.dn == dn).unwrap().start_after;
    assert_eq!(waits_for("root.pair.a"), &["root.ntp"]);
    assert_eq!(waits_for("root.pair.b"), &["root.ntp"]);
    assert_eq!(waits_for("root.ntp"), &["root.storage"]);
    assert_eq!(waits_for("root.service.s"), &["root.pair.a", "root.pair.b"]);
}

#[test]
fn what_depends_on_something_that_does_not_run_is_rejected_or_skipped() {
    // [ntp] is missing, so the part runs nothing.
    let service = service_config("a", "true", "depends_on = [\"ntp\"]");
    let error = ntp_node(&service).1.plan().unwrap_err();
    let says = "root.service.a: depends on root.ntp, which nothing runs: configure its part, or";
    assert!(matches!(error, BuildError::Plan(_)) && error.to_string().contains(says), "{error}");
    let reason = |builder: NodeBuilder| {
        let plan = builder.dev(true).plan().unwrap();
        let service = plan.services.into_iter().find(|planned| planned.dn == "root.service.a").unwrap();
        service.skip_reason.expect("skipped")
    };
    assert!(reason(ntp_node(&service).1).contains("depends on root.ntp, which nothing runs"));

    // The images are below containerd in the tree.
    let scratch = ScratchDir::new().unwrap();
    let config = format!(
        "services.etcd.enable = false\nservices.containerd = {{ binary = \"/nowhere\", preseed = \"/images\" }}\n{}",
        service_config("a", "true", "depends_on = [\"containerd.preseed\"]")
    );
    let builder = NodeHandle::builder("test.toml", config).data(scratch.path().join("data"));
    assert_eq!(reason(builder), "depends on root.containerd, which is skipped");
}

/// A part whose runnable below it is soon done, as the import of images below containerd.
struct BoxPart(mpsc::UnboundedSender<&'static str>);

impl Part for BoxPart {
    fn name(&self) -> &str {
        "box"
    }

    fn dependencies(&self, config: &NodedConfig) -> Vec<DependencyEntry> {
        let entry = DependencyEntry::of_part(self, config);
        vec![entry.child("init"), entry]
    }

    fn plan(&self, planner: &mut PartPlanner<'_>) {
        let stopped = self.0.clone();
        let run = move |ctx: Context| {
            let stopped = stopped.clone();
            async move {
                ctx.run_child("init", |ctx: Context| async move {
                    ctx.signal_ready()?;
                    ctx.signal_done()?;
                    Ok::<(), Failure>(())
                })?;
                ctx.signal_ready()?;
                let canceled = ctx.canceled().await;
                stopped.send("box")?;
                Err::<(), Failure>(canceled.into())
            }
        };
        planner.add(PlannedService::from_runnable("root.box", "a box", run));
    }
}

/// A part that depends on what is done, and needs some time to stop.
struct UserPart(mpsc::UnboundedSender<&'static str>);

impl Part for UserPart {
    fn name(&self) -> &str {
        "user"
    }

    fn dependencies(&self, config: &NodedConfig) -> Vec<DependencyEntry> {
        vec![DependencyEntry::of_part(self, config).after(["box.init"])]
    }

    fn plan(&self, planner: &mut PartPlanner<'_>) {
        let stopped = self.0.clone();
        let run = move |ctx: Context| {
            let stopped = stopped.clone();
            async move {
                ctx.signal_ready()?;
                let canceled = ctx.canceled().await;
                // If the box were stopped too, it would end meanwhile.
                tokio::time::sleep(Duration::from_millis(200)).await;
                stopped.send("user")?;
                Err::<(), Failure>(canceled.into())
            }
        };
        planner.add(PlannedService::from_runnable("root.user", "a user of the box", run));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_depends_on_a_part_of_a_runnable_that_is_done_stops_before_the_runnable() {
    let (stopped, mut order) = mpsc::unbounded_channel();
    let (_scratch, builder) = ntp_node("");
    let node = builder.with(BoxPart(stopped.clone())).with(UserPart(stopped)).start().unwrap();
    timeout(TEST_TIMEOUT, node.wait_ready("root.user")).await.unwrap();
    node.shutdown().await;
    assert_eq!((order.try_recv(), order.try_recv()), (Ok("user"), Ok("box")));
}

#[test]
fn a_part_that_depends_on_a_removed_one_is_rejected_by_name() {
    let (stopped, _) = mpsc::unbounded_channel();
    let says = "test.toml: unknown service \"box.init\" in the dependencies of user; known: metrics, kernel, storage, etcd, ";
    assert_rejected(ntp_node("").1.with(UserPart(stopped)), says);
    // The operator may name what the part names too.
    let entry = DependencyEntry::of_part(&NtpPart, &NodedConfig::default()).after(["a"]).after(["a", "b"]);
    assert_eq!(entry.depends_on, ["a", "b"]);
}

/// A part that can't be prepared.
#[derive(Debug)]
struct BrokenPart;

impl Part for BrokenPart {
    fn name(&self) -> &str {
        "broken"
    }

    fn plan(&self, planner: &mut PartPlanner<'_>) {
        planner.add(PlannedService::new("root.broken", Self));
    }
}

impl fmt::Display for BrokenPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("nothing")
    }
}

impl PlannedRunnable for BrokenPart {
    fn prepare(&self, _: &mut NodePreparation<'_>) -> Result<PreparedRunnable, PrepareError> {
        Err("the disk of broken is absent: insert it".into())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_part_that_cannot_be_prepared_leaves_neither_socket_nor_lock() {
    let (scratch, builder) = ntp_node(NTP);
    let error = builder.with(BrokenPart).start().unwrap_err();
    assert!(matches!(error, BuildError::Start(StartError::Part(_))), "{error:?}");
    assert_eq!(error.to_string(), "the disk of broken is absent: insert it");
    let data = scratch.path().join("data");
    assert!(data.join("esp").is_dir() && !data.join("run/control.sock").exists());
    let node = NodeHandle::builder("test.toml", format!("{NO_DAEMONS}{NTP}")).with(NtpPart).data(data);
    let node = node.start().unwrap();
    timeout(TEST_TIMEOUT, node.wait_ready("root.ntp")).await.unwrap();
    node.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn two_parts_that_add_one_grpc_service_keep_the_node_from_starting() {
    /// Another part with the same call.
    struct SecondPart;

    impl Part for SecondPart {
        fn name(&self) -> &str {
            "second"
        }

        fn plan(&self, planner: &mut PartPlanner<'_>) {
            planner.add(PlannedService::new("root.second", PingPlan));
        }
    }

    let error = ntp_node("").1.with(PingPart).with(SecondPart).start().unwrap_err();
    assert!(error.to_string().starts_with("duplicate gRPC service example.Ping: "), "{error}");
}

#[track_caller]
fn assert_rejected(builder: NodeBuilder, says: &str) {
    let error = builder.plan().expect_err(says);
    assert!(matches!(error, BuildError::Config(_)), "{error:?}");
    assert!(error.to_string().contains(says), "\n is: {error}\nnot: {says}");
}

#[test]
fn the_section_of_a_part_is_rejected_with_line_column_and_field() {
    for (config, says) in [
        ("[ntp]\nport = 1\n", "test.toml:4:1: ntp: missing field `server`"),
        ("[ntp]\nserver = 7\n", ":5:10: ntp.server: must be text in quotes, not 7"),
        ("[ntp]\nsrver = \"a\"\n", ":5:1: ntp.srver: unknown field `srver`, expected"),
        ("[ntp]\nserver = \"\"\n", ":5:10: ntp.server: must name a server"),
        ("ntp = 1\n", ":4:7: ntp: must be a table, written [ntp]"),
        ("[[ntp]]\nserver = \"a\"\n", ": ntp: must be a table, written [ntp]"),
        ("[npt]\nserver = \"a\"\n", ":4:2: npt: unknown field `npt`, expected one of"),
        ("[npt]\n", ", `ntp`"),
        (
            &format!("{NTP}depends_on = [\"x\"]"),
            ":6:15: ntp.depends_on[0]: unknown service \"x\" in depends_on; known: ",
        ),
        (&format!("{NTP}depends_on = \"x\""), ":6:14: ntp.depends_on: must be a list in brackets"),
        (
            &format!("{NTP}depends_on = [\"a\"]\n{}", service_config("a", "true", "depends_on = [\"ntp\"]")),
            "dependency cycle: ntp -> a -> ntp",
        ),
        (&service_config("ntp", "true", ""), "service[0].name: \"ntp\" is a built-in service"),
    ] {
        let (_scratch, builder) = ntp_node(config);
        assert_rejected(builder, says);
    }
}

#[test]
fn parts_are_replaced_and_removed_by_name() {
    /// A part that only has a name.
    struct NamedPart(&'static str);

    impl Part for NamedPart {
        fn name(&self) -> &str {
            self.0
        }

        fn plan(&self, planner: &mut PartPlanner<'_>) {
            let run = |ctx: Context| async move { ctx.until_canceled().await };
            planner.add(PlannedService::from_runnable(format!("root.{}", self.0), "a replacement", run));
        }
    }

    let builder = || ntp_node("").1;
    // NO_DAEMONS has the sections of etcd and containerd. The cluster has the ports of its etcd from the former.
    builder().without("etcd").without("control").plan().unwrap();
    assert_rejected(
        builder().replace(NamedPart("etcd")).without("cluster"),
        "services.etcd: belongs to a part that this node does not have",
    );
    let scratch = ScratchDir::new().unwrap();
    let empty =
        || NodeHandle::builder("test.toml", "").data(scratch.path().join("data")).without("containerd");
    let plan = empty().replace(NamedPart("etcd")).without("control").plan().unwrap();
    let dns: Vec<_> = plan.services.iter().map(|planned| planned.dn.as_str()).collect();
    assert!(dns.contains(&"root.etcd") && !dns.contains(&"root.control"), "{dns:?}");
    assert!(plan.to_string().contains("root.etcd                a replacement"), "{plan}");
    assert_rejected(
        builder().without("containerd"),
        "services.containerd: belongs to a part that this node does not have",
    );
    assert_rejected(
        empty().without("containrd"),
        "unknown part \"containrd\"; known: control, metrics, kernel, storage, etcd, network",
    );
    // Another network has the address from elsewhere; the shipped one needs a key.
    let cluster = || {
        let config =
            "services.containerd.enable = false\n[services.etcd]\nbinary = \"/bin/true\"\n[cluster]\n";
        NodeHandle::builder("test.toml", config).data(scratch.path().join("data"))
    };
    assert_rejected(cluster(), "cluster: requires cluster.address or cluster.interface");
    let shown = cluster().replace(NamedPart("network")).plan().unwrap().to_string();
    assert!(
        shown.contains("root.cluster             a member at the address that the program provides"),
        "{shown}"
    );
    assert_rejected(empty().replace(NamedPart("ntp")), "unknown part \"ntp\"");
    assert_rejected(empty().with(NamedPart("etcd")), "duplicate part name \"etcd\"");
    assert_rejected(empty().with(NamedPart("a.b")), "invalid part name \"a.b\"");
}

#[test]
fn a_part_has_its_own_dns_and_sections() {
    let rejected = |part: DnPart| ntp_node("").1.with(part).plan().unwrap_err().to_string();
    for (dn, says) in [
        (&["root.lease"], "invalid DN \"root.lease\" of part \"a\": use root.a or root.a.NAME"),
        (&["root.ab"], "invalid DN \"root.ab\" of part \"a\""),
        (&["root.a.b.c"], "invalid DN \"root.a.b.c\" of a part"),
    ] {
        let error = rejected(DnPart::new("a", dn));
        assert!(error.contains(says), "{error}");
    }
    for (section, says) in [
        ("node", "test.toml: invalid section name \"node\" of a part"),
        ("a.b", "invalid section name \"a.b\" of a part"),
        ("ntp", "duplicate section name \"ntp\" of two parts"),
        ("cluster", "duplicate section name \"cluster\" of two parts"),
    ] {
        let error = rejected(DnPart::new("a", &[]).section(section));
        assert!(error.contains(says), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_without_the_control_api_runs_and_stops() {
    let (scratch, builder) = ntp_node(NTP);
    let node = builder.without("control").start().unwrap();
    timeout(TEST_TIMEOUT, node.wait_ready("root")).await.unwrap();
    timeout(TEST_TIMEOUT, node.wait_ready("root.ntp")).await.unwrap();
    assert!(!scratch.path().join("data/run/control.sock").exists());
    assert!(node.shutdown().await.stragglers.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dropped_node_holds_its_data_directory_until_it_has_stopped() {
    let scratch = ScratchDir::new().unwrap();
    let data = scratch.path().join("data");
    let node = move || NodeHandle::builder("test.toml", NO_DAEMONS).data(&data);
    let (release, released) = tokio::sync::watch::channel(false);
    let run = move |ctx: Context| {
        let mut released = released.clone();
        async move {
            ctx.signal_ready()?;
            let canceled = ctx.canceled().await;
            released.wait_for(|released| *released).await?;
            Err::<(), Failure>(canceled.into())
        }
    };
    let first = node().with(ExtraRunnable::new("slow", run)).start().unwrap();
    timeout(TEST_TIMEOUT, first.wait_ready("root.slow")).await.unwrap();
    drop(first);
    assert!(node().plan().unwrap_err().to_string().contains("is in use by"));
    release.send(true).unwrap();
    let is_free = move || node().plan().map(drop).map_err(anyhow::Error::from);
    tokio::task::spawn_blocking(move || {
        testbed::wait_until(TEST_TIMEOUT, "the data directory", is_free).unwrap()
    })
    .await
    .unwrap();
}
