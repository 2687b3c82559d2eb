//! Errors of binding a secret to a Tang server, and of recovering it.

use super::jwk::Thumbprint;

/// A secret can't be bound or recovered.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TangError {
    /// The answer is not one of a Tang server, or has been changed on the way. Another attempt may help.
    #[error("invalid answer of the Tang server: {0}")]
    Answer(&'static str),
    /// The advertisement is not signed by the expected key: it is that of another server, or the server has discarded the
    /// key.
    #[error(
        "the Tang server has no advertisement that key {signer} has signed: compare it with the output of tang-show-keys \
         on the server"
    )]
    NotSigned {
        /// The thumbprint of the key that was expected.
        signer: Thumbprint,
    },
    /// The server advertises no key for this exchange.
    #[error("the Tang server advertises no ECMR key on P-521: run tangd-keygen on the server")]
    NoExchangeKey,
    /// The binding was changed, or is not one.
    #[error("damaged binding to a Tang server: {0}")]
    Binding(&'static str),
    /// The answer does not decrypt the binding: the server has another key, or the binding is damaged.
    #[error("the Tang server's answer does not open the binding")]
    WrongAnswer,
    /// The kernel has no random numbers.
    #[error("can't get random numbers")]
    Random(#[source] std::io::Error),
}
