//! `operator`: who may call the node from other machines.

use clap::Subcommand;
use nodekeel_node::access::{PublicKey, Role};
use nodekeel_node::v1::{self, AddOperatorRequest, OperatorsRequest, RemoveOperatorRequest};
use serde::Serialize;
use serde_json::json;

use super::cluster::CLUSTER_TIMEOUT;
use crate::api_client::ApiClient;
use crate::error::CommandError;
use crate::output::{Printer, TextStyle, escape_control};

#[derive(Debug, Subcommand)]
pub(crate) enum OperatorCommand {
    /// List operators, and the node's key
    List,
    /// Admit an operator to the cluster's nodes
    Add(AddArgs),
    /// Remove an operator of the cluster
    Remove {
        /// Name of the operator
        name: String,
    },
}

#[derive(Debug, clap::Args)]
pub(crate) struct AddArgs {
    /// Name of the operator
    name: String,
    /// Public key of the operator
    ///
    /// `nodectl key new FILE` prints it.
    #[arg(long, value_name = "KEY")]
    key: PublicKey,
    /// Rights: admin, operator or reader
    #[arg(long, value_name = "ROLE")]
    role: Role,
}

#[derive(Debug, Serialize)]
struct OperatorsView {
    address: String,
    node_key: String,
    operators: Vec<OperatorView>,
}

#[derive(Debug, Serialize)]
struct OperatorView {
    name: String,
    role: String,
    source: String,
    connections: u32,
    key: String,
}

impl From<v1::Operator> for OperatorView {
    fn from(operator: v1::Operator) -> Self {
        let v1::Operator { name, key, role, source, connections } = operator;
        Self { name, role, source, connections, key }
    }
}

impl OperatorCommand {
    pub(crate) async fn run(self, api: &mut ApiClient, printer: &mut Printer) -> Result<(), CommandError> {
        match self {
            Self::List => list(api, printer).await,
            Self::Add(args) => add(args, api, printer).await,
            Self::Remove { name } => remove(name, api, printer).await,
        }
    }
}

async fn add(args: AddArgs, api: &mut ApiClient, printer: &mut Printer) -> Result<(), CommandError> {
    api.raise_timeout(CLUSTER_TIMEOUT);
    let AddArgs { name, key, role } = args;
    let request = AddOperatorRequest { name: name.clone(), key: key.to_string(), role: role.to_string() };
    api.call(async |client| client.add_operator(request).await).await?;
    let text = format!("{name} may call, as {role}, each node of the cluster with api.cluster_operators");
    printer.print_result(&json!({ "name": name, "role": role.as_str() }), &text)
}

async fn remove(name: String, api: &mut ApiClient, printer: &mut Printer) -> Result<(), CommandError> {
    api.raise_timeout(CLUSTER_TIMEOUT);
    let request = RemoveOperatorRequest { name: name.clone() };
    api.call(async |client| client.remove_operator(request).await).await?;
    printer.print_result(&json!({ "removed": name }), &format!("removed {name}"))
}

async fn list(api: &mut ApiClient, printer: &mut Printer) -> Result<(), CommandError> {
    let answer = api.call(async |client| client.operators(OperatorsRequest {}).await).await?;
    let view = OperatorsView {
        address: answer.address,
        node_key: answer.node_key,
        operators: answer.operators.into_iter().map(OperatorView::from).collect(),
    };
    if printer.is_json {
        return Ok(printer.print_json(&view)?);
    }
    let (address, key) = (escape_control(&view.address), escape_control(&view.node_key));
    printer.print_line(&format!("the API listens on {address}, and its key is {key}"))?;
    let row = |operator: OperatorView| {
        let OperatorView { name, role, source, connections, key } = operator;
        let cells = [name, role, source, connections.to_string(), key].map(|cell| escape_control(&cell));
        (TextStyle::Plain, cells)
    };
    let rows: Vec<_> = view.operators.into_iter().map(row).collect();
    Ok(printer.print_table(["NAME", "ROLE", "SOURCE", "CONNECTIONS", "KEY"], &rows)?)
}
