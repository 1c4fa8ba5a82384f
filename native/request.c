/* What each frame of a client asks for. */
#define _GNU_SOURCE
#include "serve.h"

#include <errno.h>
#include <signal.h>
#include <string.h>

static bool on_exec(struct conn *conn, struct frame *frame)
{
	struct exec_request request;
	int error;
	if (frame->channel == 0 || conn_channel(conn, frame->channel))
		return false;
	switch (exec_decode(frame->payload, frame->length, &request, &error)) {
	case EXEC_BAD_FRAME:
		return false;
	case EXEC_REFUSED:
		conn_error(conn, frame->channel, error, "%s",
			   error == E2BIG ? "too many arguments and variables"
					  : "not a command: no argv, an embedded NUL, an unknown "
					    "flag or too many limits");
		return true;
	case EXEC_OK:
		break;
	}
	if (shutdown_active()) {
		exec_free(&request);
		conn_error(conn, frame->channel, ESHUTDOWN, "the sandbox is shutting down");
		return true;
	}
	command_exec(conn, frame, &request);
	return true;
}

static bool on_signal_frame(struct channel *channel, const struct frame *frame, struct reader *r)
{
	int signo = (int)read_u32(r);
	if (r->bad || r->left)
		return false;
	if (!channel || channel->command->state >= COMMAND_ENDED)
		return true;
	if (signo < 1 || signo >= NSIG)
		return false;
	if ((frame->flags & WF_SIGNAL_TREE) && signo == SIGKILL)
		command_kill(channel->command, WF_REASON_CANCELLED);
	else
		command_signal(channel->command, signo, frame->flags & WF_SIGNAL_TREE);
	return true;
}

static bool on_resize(struct channel *channel, struct reader *r)
{
	uint16_t rows = read_u16(r);
	uint16_t cols = read_u16(r);
	if (r->bad || r->left)
		return false;
	if (channel)
		stream_resize(&channel->command->out[0], rows, cols);
	return true;
}

static bool on_attach(struct conn *conn, const struct frame *frame, struct reader *r)
{
	uint32_t pid = read_u32(r);
	uint32_t credit = read_u32(r);
	uint32_t flags = read_u32(r);
	if (r->bad || r->left || frame->channel == 0 || conn_channel(conn, frame->channel))
		return false;
	channel_attach(conn, frame->channel, pid, credit, flags);
	return true;
}

/* Frames that belong to a running channel; they may come after its end. */
static bool on_channel(struct conn *conn, struct frame *frame, struct reader *r)
{
	struct channel *channel = conn_channel(conn, frame->channel);
	uint32_t bytes;
	switch (frame->type) {
	case WF_STDIN:
		if (channel && channel->command->in.claim == channel)
			return input_put(channel, frame->payload, frame->length,
					 frame->flags & WF_STDIN_EOF);
		return true;
	case WF_CREDIT:
		bytes = read_u32(r);
		if (r->bad || r->left)
			return false;
		if (channel)
			channel_credit(channel, bytes);
		return true;
	case WF_SIGNAL:
		return on_signal_frame(channel, frame, r);
	case WF_DETACH:
		if (r->left)
			return false;
		if (channel)
			channel_close(channel);
		return true;
	default:
		return on_resize(channel, r);
	}
}

static bool on_timed(struct conn *conn, const struct frame *frame, struct reader *r)
{
	uint32_t ms = read_u32(r);
	if (r->bad || r->left)
		return false;
	if (frame->type == WF_HOLD)
		hold_request(conn, frame->channel, ms);
	else
		shutdown_request(conn, frame->channel, ms);
	return true;
}

static bool on_question(struct conn *conn, const struct frame *frame)
{
	static void (*const answers[])(struct conn *, uint32_t) = {
		[WF_LIST] = facts_list,       [WF_INFO] = facts_info,
		[WF_RELEASE] = hold_release,  [WF_FREEZE] = freeze_request,
		[WF_THAW] = freeze_thaw,      [WF_NSFDS] = facts_nsfds,
		[WF_ACCOUNT] = facts_account, [WF_MAPPED] = mapped_request,
	};
	if (frame->length != 0)
		return false;
	answers[frame->type](conn, frame->channel);
	return true;
}

bool request_handle(struct conn *conn, struct frame *frame)
{
	struct reader r = {.at = frame->payload, .left = frame->length};
	switch (frame->type) {
	case WF_EXEC:
		return on_exec(conn, frame);
	case WF_STDIN:
	case WF_CREDIT:
	case WF_SIGNAL:
	case WF_DETACH:
	case WF_RESIZE:
		return on_channel(conn, frame, &r);
	case WF_ATTACH:
		return on_attach(conn, frame, &r);
	case WF_HOLD:
	case WF_SHUTDOWN:
		return on_timed(conn, frame, &r);
	case WF_LIST:
	case WF_INFO:
	case WF_RELEASE:
	case WF_FREEZE:
	case WF_THAW:
	case WF_NSFDS:
	case WF_ACCOUNT:
	case WF_MAPPED:
		return on_question(conn, frame);
	default:
		return false;
	}
}
