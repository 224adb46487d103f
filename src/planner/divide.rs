//! Distributions that a join allows on a set of devices, and the refusal of one that was asked for.

use super::cost::Question;
use super::{BoundJoin, Distribution, JoinKind, Side, Target};
use crate::columns::KeyLayout;
use crate::device::ROWS_MAX;
use crate::{Error, Result};

/// True if ranks can divide a join with the given build side in this way, and the caller asks for
/// no other.
pub(super) fn is_possible(question: &Question<'_>, build_side: Side, distribution: Distribution) -> Result<bool> {
    let Question { join, overrides, target, .. } = *question;
    let is_wanted = overrides.distribution.is_none_or(|wanted| wanted == distribution);
    Ok(match distribution {
        Distribution::Alone => true,
        Distribution::Broadcast => is_wanted && join.how.build_rows_kept(build_side).is_none(),
        Distribution::Hash => is_wanted && target.capabilities.exchanges && !is_hashed(join, build_side)?,
    })
}

/// True if the keys are too wide to be packed.
fn is_hashed(join: &BoundJoin, build_side: Side) -> Result<bool> {
    join.key_facts(build_side).map(|facts| KeyLayout::new(facts, 0).is_hashed())
}

/// Returns the refusal of a distribution by which these devices cannot run the join.
///
/// # Errors
/// The errors of [`BoundJoin::key_facts`].
pub(super) fn refusal(join: &BoundJoin, distribution: Distribution, target: &Target) -> Result<Error> {
    let name = distribution.name();
    let reason = match distribution {
        _ if target.ranks == 1 => return Ok(needs_several_devices(distribution)),
        Distribution::Broadcast if join.how == JoinKind::Full => "a full join keeps the rows of both sides that match \
             nothing, and with all rows of a side no device knows what the others have matched; ask for \"hash\" or \"auto\""
            .into(),
        Distribution::Alone | Distribution::Broadcast => {
            format!("both sides have more than {ROWS_MAX} rows, the most that a device can index; ask for \"hash\" or \"auto\"")
        }
        Distribution::Hash if !target.capabilities.exchanges => format!(
            "{} shares no memory with other devices; GPUs do if each has a process (the server's --device-processes), and \
             host devices do unless a topology file emulates links; ask for \"broadcast\" or \"auto\"",
            target.name
        ),
        Distribution::Hash if is_hashed(join, Side::Left)? => "only rows with keys of at most 16 bytes cross to the \
             device of their key, and these keys are wider; ask for \"broadcast\" or \"auto\""
            .into(),
        Distribution::Hash => {
            format!("each device would get more than {ROWS_MAX} rows of either side, the most that it can index; ask for more devices")
        }
    };
    Ok(Error::Invalid(format!("this join cannot be divided by the distribution {name:?}: {reason}")))
}

/// Returns the refusal of a distribution for a join on one device.
pub(crate) fn needs_several_devices(distribution: Distribution) -> Error {
    Error::Invalid(format!(
        "the distribution {:?} divides a join among several devices, and one device would run this join; ask for several with \
         \"devices\", as in \"devices\": 2, or leave \"distribution\" out",
        distribution.name()
    ))
}
