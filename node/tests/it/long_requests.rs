//! Requests with long texts.

use std::time::{Duration, Instant};

use nodekeel_node::v1::{
    CreateGoldenTicketRequest, ImportImagesRequest, LogLevelsRequest, LogsRequest, ReloadRequest,
    RestartRequest, SetLogLevelRequest, SignalRequest, StartRequest, StatusRequest, StopRequest,
};
use tonic::Code;

use crate::harness::{TestNode, service_config};

#[tokio::test(flavor = "multi_thread")]
async fn a_long_text_in_a_request_is_refused_at_once_by_an_error_that_repeats_a_prefix() {
    let mut node = TestNode::start(&service_config("a", "exec sleep 1000", "")).await;
    node.wait_ready("root.service.a").await;
    let (long, service) = (|| "x.".repeat(3 << 19), || "root.service.a".to_owned());
    let client = &mut node.client;
    let started = Instant::now();
    let by_dn = [
        client.status(StatusRequest { dn: long(), log_entries: 0 }).await.map(drop),
        client.logs(LogsRequest { dn: long(), ..Default::default() }).await.map(drop),
        client.log_levels(LogLevelsRequest { dn: Some(long()) }).await.map(drop),
        client.set_log_level(SetLogLevelRequest { dn: Some(long()), ..Default::default() }).await.map(drop),
        client.start(StartRequest { dn: long() }).await.map(drop),
        client.stop(StopRequest { dn: long() }).await.map(drop),
        client.restart(RestartRequest { dn: long() }).await.map(drop),
        client.signal(SignalRequest { dn: long(), signal: "HUP".into() }).await.map(drop),
        client.reload(ReloadRequest { dn: long() }).await.map(drop),
    ];
    for status in by_dn.map(|answer| answer.expect_err("no runnable has this name")) {
        assert_eq!(status.code(), Code::NotFound, "{status}");
        let text = format!("invalid DN {:?}… (3145728 bytes): it has at most 512 bytes", "x.".repeat(32));
        assert_eq!(status.message(), text);
    }
    let query = LogsRequest { dn: service(), pattern: long(), ..Default::default() };
    let others = [
        client.logs(query).await.map(drop),
        client.logs(LogsRequest { dn: service(), cursor: long(), ..Default::default() }).await.map(drop),
        client.signal(SignalRequest { dn: service(), signal: long() }).await.map(drop),
        client
            .create_golden_ticket(CreateGoldenTicketRequest { address: long(), ..Default::default() })
            .await
            .map(drop),
        client.import_images(ImportImagesRequest { namespace: long(), ..Default::default() }).await.map(drop),
    ];
    for status in others.map(|answer| answer.expect_err("it is not valid")) {
        assert!(matches!(status.code(), Code::InvalidArgument | Code::FailedPrecondition), "{status}");
        assert!(status.message().chars().count() <= 1001, "{} bytes", status.message().len());
    }
    assert!(started.elapsed() < Duration::from_secs(10), "{:?}", started.elapsed());
    // The same for what a header escapes: it is cut by characters.
    let escaped = SignalRequest { dn: service(), signal: "é".repeat(1 << 20) };
    let status = client.signal(escaped).await.expect_err("no signal");
    assert!(status.message().ends_with("éé…"), "{status}");
}
