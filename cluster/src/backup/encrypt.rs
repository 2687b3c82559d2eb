//! A snapshot as the file of a backup.

use futures_util::stream;
use ring::error::Unspecified;

use super::snapshot::SnapshotCheck;
use super::{Recipient, SnapshotError};
use crate::age::Encryptor;
use crate::consensus::SnapshotStream;

/// Encrypts a snapshot while it is read, and returns the bytes of the file in pieces.
///
/// The snapshot is verified at its end, before the last piece: without that piece, the file can't be decrypted as a whole. The
/// stream ends with its first error.
///
/// # Errors
/// [`SnapshotError`] as an item of the stream.
pub fn encrypt_snapshot(
    snapshot: SnapshotStream,
    recipient: &Recipient,
) -> impl futures_util::Stream<Item = Result<Vec<u8>, SnapshotError>> + Send + use<> {
    let file = File { snapshot, recipient: recipient.clone(), state: State::Start };
    stream::try_unfold(file, |mut file| async {
        let piece = file.next_piece().await?;
        Ok(piece.map(|piece| (piece, file)))
    })
}

struct File {
    snapshot: SnapshotStream,
    recipient: Recipient,
    state: State,
}

enum State {
    Start,
    Content(Box<(Encryptor, SnapshotCheck)>),
    End,
}

impl File {
    async fn next_piece(&mut self) -> Result<Option<Vec<u8>>, SnapshotError> {
        let failed = |Unspecified| SnapshotError::Encrypt { recipient: self.recipient.to_string() };
        let (mut encryptor, mut check) = match std::mem::replace(&mut self.state, State::End) {
            State::Start => {
                let (encryptor, start) = Encryptor::new([&self.recipient]).map_err(failed)?;
                self.state = State::Content(Box::new((encryptor, SnapshotCheck::default())));
                return Ok(Some(start));
            }
            State::Content(content) => *content,
            State::End => return Ok(None),
        };
        while let Some(piece) = self.snapshot.next_piece().await.map_err(SnapshotError::Read)? {
            check.push(&piece);
            let sealed = encryptor.push(&piece).map_err(failed)?;
            if !sealed.is_empty() {
                self.state = State::Content(Box::new((encryptor, check)));
                return Ok(Some(sealed));
            }
        }
        check.finish()?;
        encryptor.finish().map(Some).map_err(failed)
    }
}

#[cfg(test)]
mod tests {
    use futures_util::{StreamExt as _, TryStreamExt as _};

    use super::super::snapshot::tests::snapshot_file;
    use super::*;
    use crate::consensus::MembershipError;

    const RECIPIENT: &str = "age1ql3z7hjy54pw3hyww5ayyfg7zqgvc7w3j2elw8zmrj2kg5sfn9aqmcac8p";

    async fn encrypted(pieces: Vec<Result<Vec<u8>, MembershipError>>) -> Vec<Result<Vec<u8>, SnapshotError>> {
        let snapshot = SnapshotStream::new(stream::iter(pieces));
        encrypt_snapshot(snapshot, &RECIPIENT.parse().unwrap()).collect().await
    }

    #[tokio::test]
    async fn a_file_has_its_last_chunk_only_if_the_snapshot_is_whole() {
        let file = snapshot_file(1000);
        let pieces = |file: &[u8]| file.chunks(32 << 10).map(|piece| Ok(piece.to_vec())).collect::<Vec<_>>();
        let whole: Vec<_> = encrypted(pieces(&file)).await.into_iter().collect::<Result<_, _>>().unwrap();
        // Each chunk has a tag; the header and the nonce are short.
        let (length, plain) = (whole.concat().len(), file.len());
        let tags = plain.div_ceil(64 << 10) * 16;
        assert!((plain + tags..plain + tags + 300).contains(&length), "{plain}, {length}");

        let mut changed = file.clone();
        changed[300_000] ^= 1;
        let mut ended = encrypted(pieces(&changed)).await;
        assert!(matches!(ended.pop(), Some(Err(SnapshotError::Damaged { .. }))));
        assert_eq!(ended.len(), whole.len() - 1);

        let mut lost = pieces(&file);
        lost.truncate(5);
        lost.push(Err(MembershipError::Stopped));
        let stream = SnapshotStream::new(stream::iter(lost));
        let recipient = RECIPIENT.parse().unwrap();
        let read: Result<Vec<_>, _> = encrypt_snapshot(stream, &recipient).try_collect().await;
        assert!(matches!(read, Err(SnapshotError::Read(MembershipError::Stopped))));
    }
}
