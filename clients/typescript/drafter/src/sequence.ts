// The state of one sequence: the committed tokens, and a chain of guesses behind them. No network
// here.
import { create } from "@bufbuild/protobuf";
import {
  type Opened,
  type Proposal,
  ProposalSchema,
  type Skip,
  SkipSchema,
  type SparseDistribution,
  SparseDistributionSchema,
  type Verdict,
  type Window,
} from "../gen/outrider/v1/drafts_pb.js";

const MAX_PROPOSAL_TOKENS = 1024;

/** Guessed tokens; if they were sampled, with the distribution that each was drawn from. */
export type Guesses = number[] | { tokens: number[]; distributions: SparseDistribution[] };
/** Guesses that `tokens` follow the first `at` guesses, instead of the other guesses. */
export type Branch = { at: number; tokens: number[] };

export interface Strategy {
  /** At most `count` tokens that may follow the text. The text ends with the guesses so far. */
  guess(text: readonly number[], count: number): Guesses;
  /** Branches beside the chain of guesses. */
  branch?(committed: readonly number[], guesses: readonly number[]): Branch[];
}

export class Sequence {
  readonly committed: number[];
  guesses: number[] = [];
  private wanted: number;
  private window: Window | undefined;
  private sent = 0;
  private distributions: SparseDistribution[] = []; // of the unsent guesses
  private givenUp = false; // the chain is not extended before the next verdict
  private branched = false;
  private skipped = false;

  constructor(private readonly opened: Opened, private readonly strategy: Strategy) {
    this.committed = [...opened.tokenIds];
    this.wanted = opened.draftTokens;
    this.window = opened.window;
  }

  /**
   * Applies a verdict. One without new tokens changes nothing. Throws if the verdict leaves a gap.
   */
  follow(verdict: Verdict): void {
    const fresh = verdict.committedLength - this.committed.length;
    if (fresh > verdict.newTokenIds.length) {
      throw new Error(`a verdict of sequence ${verdict.sequenceId} leaves a gap`);
    }
    if (fresh <= 0) return;
    const added = verdict.newTokenIds.slice(verdict.newTokenIds.length - fresh);
    const agrees = added.every((token, i) => i >= this.guesses.length || token === this.guesses[i]);
    this.committed.push(...added);
    this.guesses = agrees ? this.guesses.slice(added.length) : [];
    this.sent = agrees ? Math.max(0, this.sent - added.length) : 0;
    this.distributions = [];
    this.givenUp = this.branched = this.skipped = false;
    this.wanted = verdict.draftTokens;
    this.window = verdict.window ?? this.window;
  }

  /** How many more guesses the chain may have. */
  get room(): number {
    if (this.givenUp || this.window === undefined) return 0;
    const most = Math.min(this.window.depth, this.window.tokenCount, MAX_PROPOSAL_TOKENS);
    return Math.max(0, most - this.guesses.length);
  }

  /** Whether the verifier may be waiting for guesses. */
  get urgent(): boolean {
    return this.guesses.length < this.wanted && this.room > 0;
  }

  /**
   * Asks the strategy for the guesses that the verifier's next step lacks. If it lacks none, asks
   * for the guesses of one more step.
   */
  extend(): void {
    const lacking = this.urgent ? this.wanted - this.guesses.length : this.wanted;
    const count = Math.min(lacking, this.room);
    const found = count > 0 ? this.strategy.guess([...this.committed, ...this.guesses], count) : [];
    const tokens = (Array.isArray(found) ? found : found.tokens).slice(0, count);
    if (!Array.isArray(found)) this.distributions.push(...found.distributions.slice(0, count));
    this.guesses.push(...tokens);
    this.givenUp = tokens.length === 0;
  }

  /** The unsent guesses as a proposal that is complete in itself; undefined if there are none. */
  proposal(): Proposal | undefined {
    if (this.sent === this.guesses.length) return undefined;
    const place = { sequenceId: this.opened.sequenceId, baseLength: this.committed.length };
    const proposal = create(ProposalSchema, { ...place, tokenIds: [...this.guesses] });
    if (this.distributions.length > 0) {
      // A distribution without ids stands for the one that was sent with the same token before.
      const length = this.guesses.length - this.distributions.length;
      const before = Array.from({ length }, () => create(SparseDistributionSchema));
      proposal.distributions = [...before, ...this.distributions];
      this.distributions = [];
    } else {
      this.addBranches(proposal);
    }
    this.sent = this.guesses.length;
    return proposal;
  }

  /** Adds the strategy's branches to the proposal, as far as the window has room. */
  private addBranches(proposal: Proposal): void {
    if (this.strategy.branch === undefined || this.branched) return;
    this.branched = true;
    let room = (this.window?.tokenCount ?? 0) - this.guesses.length;
    proposal.parents = this.guesses.map((_, i) => i);
    for (const { at, tokens } of this.strategy.branch(this.committed, this.guesses)) {
      if (at > this.guesses.length || tokens.length > room) continue;
      room -= tokens.length;
      tokens.forEach((token, i) => {
        proposal.parents.push(i === 0 ? at : proposal.tokenIds.length);
        proposal.tokenIds.push(token);
      });
    }
  }

  /**
   * The message that no more guesses come. It is made once for each committed length, and only if
   * the verifier may be waiting for more.
   */
  skip(): Skip | undefined {
    if (this.skipped || this.room > 0 || this.guesses.length >= this.wanted) return undefined;
    this.skipped = true;
    const place = { sequenceId: this.opened.sequenceId, baseLength: this.committed.length };
    return create(SkipSchema, place);
  }
}
