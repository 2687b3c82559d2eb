//! A node program with a part of its own next to the shipped ones: a table of the configuration, and a
//! socket. etcd, containerd and volumes run as in noded, where they are installed.
//!
//! `cargo run -p examples --features node --example own_part -- run --dev --data target/weather`, and then
//! `nodectl --socket target/weather/run/control.sock health`.

use std::process::ExitCode;

use nodekeel_node::config::ConfigSection;
use nodekeel_node::localstorage::tree::LayoutSocket;
use nodekeel_node::part::{Part, PartPlanner, PlannedService};
use nodekeel_node::supervisor::Context;
use serde::Deserialize;

nodekeel_node::localstorage::layout! {
    /// In `run` below the data directory.
    struct WeatherLayout {
        /// Answers with the weather.
        socket: LayoutSocket = "weather.sock", 0o600;
    }
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct WeatherConfig {
    place: String,
}

struct WeatherPart;

impl Part for WeatherPart {
    fn name(&self) -> &str {
        "weather"
    }

    fn sections(&self) -> Vec<ConfigSection> {
        vec![ConfigSection::new::<WeatherConfig>("weather")]
    }

    fn plan(&self, planner: &mut PartPlanner<'_>) {
        let Some(config) = planner.config().section::<WeatherConfig>("weather").cloned() else { return };
        let socket = match planner.plan_run_layout::<WeatherLayout>() {
            Ok(layout) => layout.socket.path().to_owned(),
            Err(error) => return planner.report(format!("weather: {error}")),
        };
        planner.check_socket(&socket, "node.data");
        let summary = format!("the weather of {}, at {}", config.place, socket.display());
        planner.add(PlannedService::from_runnable("root.weather", summary, move |ctx: Context| {
            let socket = socket.clone();
            async move {
                // A run that was killed has left its file.
                let _ = std::fs::remove_file(&socket);
                let listener = tokio::net::UnixListener::bind(&socket)?;
                ctx.signal_ready()?;
                loop {
                    tokio::select! {
                        caller = listener.accept() => drop(caller?.0.try_write(b"sunny\n")),
                        canceled = ctx.until_canceled() => return canceled,
                    }
                }
            }
        }));
    }
}

const CONFIG: &str = "[weather]\nplace = \"roof\"\n";

fn main() -> ExitCode {
    let weatherd = nodekeel_node::program("weatherd", |node| node.with(WeatherPart));
    weatherd.version(env!("CARGO_PKG_VERSION")).config(CONFIG).metric_prefix("weatherd").main()
}
