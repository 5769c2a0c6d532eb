// One text as the drafter follows it: the committed tokens, and a chain of guesses behind them. Knows no network.
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

/** Tokens, and for those that were sampled what each was drawn from. */
export type Guesses = number[] | { tokens: number[]; distributions: SparseDistribution[] };
/** `tokens` follow the first `at` guesses, instead of the others. */
export type Branch = { at: number; tokens: number[] };

export interface Strategy {
  /** Up to `count` tokens that may follow the text, which has the guesses so far at its end. */
  guess(text: readonly number[], count: number): Guesses;
  /** What may be committed beside the chain. */
  branch?(committed: readonly number[], guesses: readonly number[]): Branch[];
}

export class Sequence {
  readonly committed: number[];
  guesses: number[] = [];
  private wanted: number;
  private window: Window | undefined;
  private sent = 0;
  private distributions: SparseDistribution[] = []; // of the guesses that were not sent yet
  private givenUp = false; // nothing more is offered before the next verdict
  private branched = false;
  private skipped = false;

  constructor(private readonly opened: Opened, private readonly strategy: Strategy) {
    this.committed = [...opened.tokenIds];
    this.wanted = opened.draftTokens;
    this.window = opened.window;
  }

  /** Takes in a verdict. One that says nothing new changes nothing; one that leaves a gap is an error. */
  follow(verdict: Verdict): void {
    const fresh = verdict.committedLength - this.committed.length;
    if (fresh > verdict.newTokenIds.length) throw new Error(`a verdict of sequence ${verdict.sequenceId} leaves a gap`);
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
    return Math.max(0, Math.min(this.window.depth, this.window.tokenCount, MAX_PROPOSAL_TOKENS) - this.guesses.length);
  }

  /** Whether the verifier may be waiting. */
  get urgent(): boolean {
    return this.guesses.length < this.wanted && this.room > 0;
  }

  /** Asks for what the verifier's next step lacks, or for one such portion further ahead. */
  extend(): void {
    const count = Math.min(this.urgent ? this.wanted - this.guesses.length : this.wanted, this.room);
    const found = count > 0 ? this.strategy.guess([...this.committed, ...this.guesses], count) : [];
    const tokens = (Array.isArray(found) ? found : found.tokens).slice(0, count);
    if (!Array.isArray(found)) this.distributions.push(...found.distributions.slice(0, count));
    this.guesses.push(...tokens);
    this.givenUp = tokens.length === 0;
  }

  /** What was not sent yet, complete in itself. */
  proposal(): Proposal | undefined {
    if (this.sent === this.guesses.length) return undefined;
    const place = { sequenceId: this.opened.sequenceId, baseLength: this.committed.length };
    const proposal = create(ProposalSchema, { ...place, tokenIds: [...this.guesses] });
    if (this.distributions.length > 0) {
      // One without ids stands for what was said of the same token before.
      const before = this.guesses.length - this.distributions.length;
      proposal.distributions = [...Array.from({ length: before }, () => create(SparseDistributionSchema)), ...this.distributions];
      this.distributions = [];
    } else {
      this.addBranches(proposal);
    }
    this.sent = this.guesses.length;
    return proposal;
  }

  /** Hangs what the strategy guesses beside the chain into the proposal, as far as the window has room. */
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

  /** That no more comes, once for each committed length, if the verifier may be waiting for more. */
  skip(): Skip | undefined {
    if (this.skipped || this.room > 0 || this.guesses.length >= this.wanted) return undefined;
    this.skipped = true;
    return create(SkipSchema, { sequenceId: this.opened.sequenceId, baseLength: this.committed.length });
  }
}
